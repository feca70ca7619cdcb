"""The interfaces of other servers for networks that classify texts: a client changes its URL and nothing else.

Each module holds the forms of one family of servers, and `front/http.py` says which paths take them
(docs/interfaces.md).
"""
