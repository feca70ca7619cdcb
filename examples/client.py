"""A client of a running server, with Python's standard library: it prints the answers, or the error.

Run: isobatch serve my-bert-ee, and elsewhere: python examples/client.py http://127.0.0.1:8000 'a good film'

An input is a text, or JSON: '[[0, 255], [255, 0]]' is an image.
"""

import json
import sys
import urllib.error
import urllib.request


def predict(address: str, inputs: list[object], deadline_ms: float = 1000.0) -> list[dict[str, object]]:
    """The answers in order. A refused request (503) is worth another try after Retry-After seconds."""
    body = json.dumps({"inputs": inputs}).encode()
    headers = {"Content-Type": "application/json", "X-Deadline-Ms": str(deadline_ms)}
    with urllib.request.urlopen(urllib.request.Request(f"{address}/predict", body, headers)) as reply:
        outputs: list[dict[str, object]] = json.load(reply)["outputs"]
        return outputs


def value_of(argument: str) -> object:
    try:
        return json.loads(argument)
    except ValueError:
        return argument


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    try:
        for output in predict(sys.argv[1], [value_of(each) for each in sys.argv[2:]]):
            print(output)
    except urllib.error.HTTPError as error:
        sys.exit(f"{error.code}: {json.load(error)['error']}")
    except urllib.error.URLError as error:
        sys.exit(f"nobody answers at {sys.argv[1]}: {error.reason}")
