"""Texts that are JSON: which tokens may come next, by a schema. The grammars are those of llguidance.

A ramp and the head choose among the same tokens, so an exit cannot break a schema.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Listed
from decimal import Decimal
from itertools import chain, takewhile
from math import lcm
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import torch
from torch import Tensor

from isobatch.deployments.decoding.sequences import Sampling
from isobatch.deployments.transport.device_copies import to_device

if TYPE_CHECKING:
    from llguidance import LLMatcher

Written = tuple[int, ...]
FEW_MATCHERS = 256  # that are kept, each for one text; twice as many as the largest launch has texts, if that is more
MOST_SCHEMA = 2**14  # characters: compiling a schema holds up everyone else's tokens
# The least common multiple of all numbers in `multipleOf`: llguidance compiles about 50,000 remainders in a second.
MOST_REMAINDERS = 10_000
MOST_PATTERNS = 8  # of which a text may have to match several: each makes llguidance's check three times as long
MOST_NAMED = 32  # patterns of names: llguidance compares each with each other one
MOST_FUEL = 100_000  # of llguidance, for the expressions of a grammar: with its own limit, seconds pass for a token
BITS = 32  # of a number of llguidance's masks


def grammar_of(schema: dict[str, Any]) -> str:
    """The grammar of all JSON with this schema, in one line: some networks never end a blank. Raises ValueError with
    the reason if there is none."""
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise ValueError("this server has no llguidance: pip install 'isobatch[json]'") from error
    if len(str(schema)) > MOST_SCHEMA:
        raise ValueError(f"the schema must have at most {MOST_SCHEMA} characters")
    if lcm(*_multiples(schema)) > MOST_REMAINDERS:
        reason = f"must have a common multiple of at most {MOST_REMAINDERS:,}, without decimal point and final zeros"
        raise ValueError(f"the numbers in multipleOf {reason}")
    if (patterns := _together(schema)) > MOST_PATTERNS:
        reason = f"{MOST_PATTERNS} are allowed where several may be for one text"
        raise ValueError(f"the schema has {patterns} patterns: {reason}")
    if (named := sum(_named(part) for part in _parts(schema))) > MOST_NAMED:
        raise ValueError(f"the schema has {named} patternProperties: {MOST_NAMED} are allowed")
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": " ?"})
    if problem := LLMatcher.validate_grammar(grammar):
        raise ValueError(" ".join(problem.split()))
    if "$ref" in str(schema) and "$id" not in str(list(schema.values())) and not _ends(schema):
        raise ValueError("no JSON ends by this schema: its $ref leads to itself, again and again")
    return grammar


def _ends(schema: dict[str, Any]) -> bool:
    """Whether a JSON with this schema can be complete, although the schema may lead to itself."""
    needs, users = dict[int, list[Listed[Any]]](), defaultdict[int, list[int]](list)
    parts = deque[Any]([schema])
    while parts:
        part = parts.popleft()
        if id(part) not in needs:
            needs[id(part)] = list(_needs(part, schema))
            for one in chain(*needs[id(part)]):
                parts.append(one)
                users[id(one)].append(id(part))
    ended, unsure = set[int](), deque(needs)
    while unsure:
        each = unsure.popleft()
        if each not in ended and all(any(id(one) in ended for one in listed) for listed in needs[each]):
            ended.add(each)
            unsure += users[each]
    return id(schema) in ended


def _needs(part: Any, schema: dict[str, Any]) -> Iterator[Listed[Any]]:
    """Lists of schemas: each JSON with this part of a schema contains, or is, a JSON with one schema of each list."""
    if not isinstance(part, dict) or not part.keys().isdisjoint(("const", "enum")):
        return
    if (name := part.get("$ref")) is not None:
        yield [_referred(name, schema)]
        return
    yield from (part[key] for key in ("anyOf", "oneOf") if key in part)
    yield from ([each] for each in part.get("allOf", ()))
    if part.get("type") == "object" and "patternProperties" not in part:
        named, others = part.get("properties", {}), part.get("additionalProperties")
        yield from ([named.get(each, others)] for each in part.get("required", ()))
    if part.get("type") == "array":
        first, others = part.get("prefixItems", []), part.get("items")
        yield from ([each] for each in [*first, others][: part.get("minItems", 0)])


def _referred(name: str, schema: dict[str, Any]) -> Any:
    """The part of a schema that a reference leads to; None: it leads by an anchor, or to another schema."""
    place, part = unquote(name.removeprefix(str(schema.get("$id", ""))).removeprefix("#")), schema
    if place and not place.startswith("/"):
        return None
    for key in place.split("/")[1:]:
        part = part[int(key)] if isinstance(part, list) else part[key.replace("~1", "/").replace("~0", "~")]
    return part


def _multiples(schema: object) -> Iterator[int]:
    """The numbers of which a schema asks for multiples, each without decimal point and final zeros.

    >>> list(_multiples({"multipleOf": 0.25, "items": [{"multipleOf": -500}, {"properties": {"multipleOf": {}}}]}))
    [25, 5]
    """
    for part in _parts(schema):
        number = part.get("multipleOf")
        if isinstance(number, int | float):
            yield int("".join(map(str, Decimal(str(+number)).normalize().as_tuple().digits))) or 1


def _together(schema: object) -> int:
    """The number of patterns in a schema, if a text may have to match several of them.

    >>> _together({"items": [{"pattern": "a"}] * 3}), _together({"allOf": [{"pattern": "a"}] * 3})
    (0, 3)
    """
    parts = list(_parts(schema))
    several = {"pattern", "$ref", "anyOf", "oneOf"}
    if not any("allOf" in part or len(part.keys() & several) > 1 for part in parts):
        return 0
    return sum(isinstance(part.get("pattern"), str) for part in parts)


def _named(part: dict[str, Any]) -> int:
    patterns = part.get("patternProperties")
    return len(patterns) if isinstance(patterns, dict) else 0


def _parts(schema: object) -> Iterator[dict[str, Any]]:
    """All objects in a schema."""
    parts = deque([schema])
    while parts:
        part = parts.popleft()
        if isinstance(part, dict):
            yield part
            parts += part.values()
        elif isinstance(part, list):
            parts += part


class Grammars:
    """The texts of one process that follow grammars. It is made when the process starts, which takes about a second.

    `obstacle`: why this network can follow no grammar; empty: it can.
    """

    def __init__(self, words: Any, vocabulary: int, stop: Collection[int]) -> None:
        self._tokenizer: Any = None
        self.obstacle = "" if stop else "the model has no token that ends a text"
        self._matched: OrderedDict[tuple[str, int], _Matched] = OrderedDict()
        self._most = FEW_MATCHERS
        try:
            from llguidance.hf import from_tokenizer

            self._tokenizer = from_tokenizer(words, vocabulary, sorted(stop))
        except Exception as error:  # llguidance is not installed, or the tokenizer is unlike those that it knows
            self.obstacle = self.obstacle or f"llguidance cannot read the model's tokenizer: {error}"

    def apply(self, logits: Tensor, texts: Listed[tuple[Sampling, Written]]) -> None:
        """Give tokens that break the grammar of a row no probability. `texts`: what was written before each row."""
        rows = [row for row, (sampling, _) in enumerate(texts) if sampling.grammar]
        if not rows:
            return
        self._most = max(self._most, 2 * len(rows))
        masks = np.zeros((len(rows), -(-logits.shape[1] // BITS)), np.int32)
        for mask, row in zip(masks, rows, strict=True):
            self._matcher(*texts[row]).unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        allowed = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
        places, banned = to_device([rows, allowed == 0], logits.device)
        logits[places] = logits[places].masked_fill(banned, -torch.inf)

    def _matcher(self, sampling: Sampling, written: Written) -> "LLMatcher":
        """The matcher of a text, after its written tokens. Texts that share a matcher move its state back and forth."""
        key = sampling.grammar, sampling.seed
        matched = self._matched.pop(key, None)
        if matched is None or matched.failed:
            matched = _Matched(self._tokenizer, sampling.grammar)
        self._matched[key] = matched
        if len(self._matched) > self._most:
            self._matched.popitem(last=False)
        return matched.after(written)


class _Matched:
    """A matcher, and the tokens that it has read."""

    def __init__(self, tokenizer: Any, grammar: str) -> None:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(initial_lexer_fuel=MOST_FUEL)
        self._matcher, self._read = LLMatcher(tokenizer, grammar, limits=limits), Written()

    @property
    def failed(self) -> bool:
        """Whether a limit of llguidance was reached. Then only a token that ends the text was allowed."""
        return self._matcher.is_error()

    def after(self, written: Written) -> "LLMatcher":
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._read, written, strict=False)))
        self._matcher.rollback(len(self._read) - same)
        self._matcher.consume_tokens(list(written[same:]))
        self._read = written
        return self._matcher
