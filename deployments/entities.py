"""Entities: neighbouring words of a text whose labels say that they belong together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

OUTSIDE = "O"  # the label of words that belong to no entity


@dataclass(frozen=True)
class Tag:
    """The meaning of a word's label: the kind of its entity ("": none), and the word's place in the entity."""

    place: str
    kind: str

    @classmethod
    def of(cls, name: str) -> "Tag":
        """Parse a label of any common scheme: BIO, BIOES, BILOU, or kinds alone.

        >>> [(tag.place, tag.kind) for tag in map(Tag.of, ("B-PER", "L-PER", "PER", "O"))]
        [('B', 'PER'), ('E', 'PER'), ('I', 'PER'), ('', '')]
        """
        if name == OUTSIDE:
            return cls("", "")
        place = PLACES.get(name[:2])
        return cls(place, name[2:]) if place else cls("I", name)

    def follows(self, before: "Tag") -> bool:
        """Whether the word belongs to the same entity as the word before it."""
        return self.kind == before.kind and before.place in ("B", "I") and self.place in ("I", "E")


NOWHERE = Tag("", "")
PLACES = {"B-": "B", "I-": "I", "E-": "E", "L-": "E", "S-": "S", "U-": "S"}  # begins, inside, ends, single


def entities_of(tokens: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Join neighbouring words of one kind, as transformers' pipeline does with `aggregation_strategy="first"`.

    >>> named = [("B-PER", 0.9, 0, 3), ("I-PER", 0.7, 4, 7), ("O", 0.9, 8, 11), ("B-LOC", 0.5, 12, 15)]
    >>> tokens = [{"name": name, "score": score, "start": start, "end": end} for name, score, start, end in named]
    >>> [(each["entity_group"], each["score"], each["word"]) for each in entities_of(tokens, "Ada Bee saw Rom")]
    [('PER', 0.8, 'Ada Bee'), ('LOC', 0.5, 'Rom')]
    """
    groups: list[tuple[str, list[dict[str, Any]]]] = []
    before = NOWHERE
    for token in tokens:
        tag = Tag.of(token["name"])
        if tag.follows(before):
            groups[-1][1].append(token)
        elif tag.kind:
            groups.append((tag.kind, [token]))
        before = tag
    return [
        {
            "entity_group": kind,
            "score": sum(token["score"] for token in group) / len(group),
            "word": text[group[0]["start"] : group[-1]["end"]],
            "start": group[0]["start"],
            "end": group[-1]["end"],
        }
        for kind, group in groups
    ]
