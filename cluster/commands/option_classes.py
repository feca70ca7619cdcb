"""Options of commands as dataclasses: each field is an option, annotated for typer, with its default."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from profiles.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

KindOptions = TypeVar("KindOptions", bound="DataclassInstance")
Command = Callable[..., None]


@dataclass(frozen=True)
class GivenOptions:
    """The values of all options of a command that has other ones for each kind of network."""

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def only(self, kind: type[KindOptions], refusal: str) -> KindOptions:
        """Those of one kind. Raise UserError if another option was given: if its value is not its default."""
        names = {field.name for field in fields(kind)}
        for name, value in self.values.items():
            if name not in names and value not in (self.defaults[name], []):  # []: a repeatable option, not given
                raise UserError(f"{flag(name)} {refusal}")
        return kind(**{name: self.values[name] for name in names})


def of_kinds(
    *kinds: "type[DataclassInstance]", panels: Mapping[str, Iterable[str]] | None = None
) -> Callable[[Callable[[GivenOptions], None]], Command]:
    """Makes a command of a function: its options are the fields of these classes, in these panels of --help."""
    parameters = {each.name: each for kind in kinds for each in _parameters(kind)}
    for panel, names in (panels or {}).items():
        for name in names:
            (option,) = parameters[name].annotation.__metadata__
            option.rich_help_panel = panel
    defaults = {name: each.default for name, each in parameters.items()}

    def decorate(function: Callable[[GivenOptions], None]) -> Command:
        @wraps(function)
        def command(**values: Any) -> None:
            function(GivenOptions(values, defaults))

        return _signed(command, parameters.values())

    return decorate


def with_options(**classes: "type[DataclassInstance]") -> Callable[[Command], Command]:
    """Adds the fields of these classes to a command's own options. Its function gets an object of each."""
    packed = {name: _parameters(each) for name, each in classes.items()}

    def decorate(function: Command) -> Command:
        @wraps(function)
        def command(**values: Any) -> None:
            for name, kind in classes.items():
                values[name] = kind(**{each.name: values.pop(each.name) for each in packed[name]})
            function(**values)

        own = [each for each in signature(function, eval_str=True).parameters.values() if each.name not in classes]
        return _signed(command, [*own, *(each for parameters in packed.values() for each in parameters)])

    return decorate


def called(command: Command, **values: Any) -> None:
    """Call a command as from the command line: options that are not given have their defaults."""
    defaults = {name: each.default for name, each in signature(command).parameters.items()}
    command(**(defaults | values))


def flag(name: str) -> str:
    """The option on the command line that a parameter of a command stands for.

    >>> flag("slo_ms"), flag("as_json")
    ('--slo-ms', '--json')
    """
    return f"--{name.removeprefix('as_').replace('_', '-')}"


def _parameters(kind: "type[DataclassInstance]") -> list[Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        Parameter(
            each.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if each.default is MISSING else each.default,
            annotation=hints[each.name],
        )
        for each in fields(kind)
    ]


def _signed(command: Command, parameters: Iterable[Parameter]) -> Command:
    """The command with a signature that typer reads."""
    keywords = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in parameters]
    command.__signature__ = Signature(keywords)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in keywords}
    return command
