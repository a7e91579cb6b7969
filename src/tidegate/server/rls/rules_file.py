"""Rules files: the YAML layout of the envoyproxy/ratelimit configuration, unchanged.

A file is read completely or not at all, and every fault is named with file, line, path and value. What is not supported
is a fault: a limit that is silently not applied would be worse than a server that does not start. Files come from
operators, yet there are bounds: size, nesting, and no aliases, which could make a small file a large one.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from tidegate.core.model import NAME_LENGTH_MAX
from tidegate.errors import ConfigurationError
from tidegate.server.rls.messages import ENTRIES_MAX, UINT32_MAX
from tidegate.server.rls.rules import UNITS, Branch, Detail, Level, Rule, RuleSet, Step

FILE_BYTES_MAX: Final = 4_194_304
# Levels of descriptors nest twice each (a list in a mapping): deeper than ENTRIES_MAX no descriptor reaches.
NESTING_MAX: Final = 2 * ENTRIES_MAX + 8
SUFFIXES: Final = (".yaml", ".yml")
FAULTS_SHOWN_MAX: Final = 20

_TEXT_SHOWN_MAX: Final = 60


class RuleFault(NamedTuple):
    """One thing that is wrong."""

    file: str
    line: int
    path: str
    """Such as `descriptors[2].rate_limit.unit`."""
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.path}: {self.message}" if self.path else f"{place}: {self.message}"


class RulesError(ConfigurationError):
    """Rules files with faults."""

    def __init__(self, faults: list[RuleFault]) -> None:
        shown = [str(fault) for fault in faults[:FAULTS_SHOWN_MAX]]
        if len(faults) > len(shown):
            shown.append(f"and {len(faults) - len(shown)} more")
        super().__init__("; ".join(shown))
        self.faults = faults


def rule_files(place: Path) -> list[Path]:
    """The file itself, or the rules files of a directory in the order of their names. Hidden files do not count."""
    if not place.is_dir():
        return [place]
    found = sorted(
        path for path in place.iterdir() if path.suffix in SUFFIXES and not path.name.startswith(".")
    )
    if not found:
        raise RulesError([RuleFault(str(place), 0, "", "no files that end in .yaml or .yml")])
    return found


def load_rules(place: Path) -> RuleSet:
    """The rules of a file, or of all files of a directory."""
    texts: list[tuple[str, bytes]] = []
    faults: list[RuleFault] = []
    for path in rule_files(place):
        try:
            with path.open("rb") as file:
                texts.append((str(path), file.read(FILE_BYTES_MAX + 1)))
        except OSError as error:
            faults.append(RuleFault(str(path), 0, "", f"cannot be read: {error.strerror}"))
    if faults:
        raise RulesError(faults)
    return parse_rules(texts)


def parse_rules(texts: Iterable[tuple[str, bytes]]) -> RuleSet:
    """The rules of all (file name, content)."""
    domains: dict[str, Level] = {}
    faults: list[RuleFault] = []
    for name, text in texts:
        reader = _FileReader(name)
        reader.read(text, domains)
        faults += reader.faults
    if faults:
        raise RulesError(faults)
    return RuleSet(domains)


_ROOT_KEYS: Final = ("domain", "descriptors")
_DESCRIPTOR_KEYS: Final = (
    "key", "value", "rate_limit", "descriptors", "shadow_mode", "detailed_metric", "value_to_metric",
    "share_threshold",
)  # fmt: skip
_LIMIT_KEYS: Final = ("unit", "requests_per_unit", "unlimited", "name", "replaces")
# Keys of envoyproxy/ratelimit that have no meaning here, with the reason.
_UNSUPPORTED: Final = {
    "quota_mode": "quota mode is not supported: use shadow_mode to report without denying",
}


class _FileReader:
    """One file. Collects faults instead of stopping at the first."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.faults: list[RuleFault] = []

    def _fault(self, node: Any, path: str, message: str) -> None:
        line = node.start_mark.line + 1 if node is not None else 0
        self.faults.append(RuleFault(self.name, line, path, message))

    def read(self, text: bytes, domains: dict[str, Level]) -> None:
        if len(text) > FILE_BYTES_MAX:
            self.faults.append(RuleFault(self.name, 0, "", f"larger than {FILE_BYTES_MAX} bytes"))
            return
        root = self._compose(text)
        fields = self._mapping(root, "", _ROOT_KEYS)
        if fields is None:
            return
        domain = self._text(fields.get("domain"), "domain")
        if not domain or len(domain) > NAME_LENGTH_MAX:
            expected = f"expected a name of 1 to {NAME_LENGTH_MAX} characters"
            self._fault(fields.get("domain", root), "domain", f"got {_shown(domain)}, {expected}")
            return
        if domain in domains:
            message = f"{_shown(domain)} is defined twice: put its rules into one file"
            self._fault(fields["domain"], "domain", message)
            return
        domains[domain] = self._level(fields.get("descriptors"), "descriptors", domain, "", Detail.NONE)

    def _compose(self, text: bytes) -> Any:
        """The document's nodes. Checked for aliases and depth before anything is built from it."""
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        depth = 0
        try:
            for event in yaml.parse(text, Loader=loader):
                if isinstance(event, yaml.AliasEvent):
                    message = f"the alias *{event.anchor}: aliases are not supported, write it out"
                    self._fault(event, "", message)
                    return None
                if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
                    depth += 1
                elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
                    depth -= 1
                if depth > NESTING_MAX:
                    self._fault(event, "", f"nested deeper than {NESTING_MAX} levels")
                    return None
            root = yaml.compose(text, Loader=loader)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            problem = getattr(error, "problem", None) or str(error).splitlines()[0]
            self.faults.append(RuleFault(self.name, mark.line + 1 if mark else 0, "", f"not YAML: {problem}"))
            return None
        if root is None:
            self.faults.append(RuleFault(self.name, 0, "", "the file is empty"))
        return root

    # Values.

    def _mapping(self, node: Any, path: str, keys: tuple[str, ...]) -> dict[str, Any] | None:
        """The values of a mapping by key. Keys that are unknown or come twice are faults."""
        if node is None:
            return None
        if not isinstance(node, yaml.MappingNode):
            self._fault(node, path, f"got {_kind(node)}, expected a mapping with {', '.join(keys)}")
            return None
        fields: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            place = f"{path}.{key}" if path else str(key)
            if key in _UNSUPPORTED:
                self._fault(key_node, place, _UNSUPPORTED[key])
            elif key is None or key not in keys:
                self._fault(key_node, path, f"unknown key {_shown(key)}, expected one of {', '.join(keys)}")
            elif key in fields:
                self._fault(key_node, place, "is defined twice")
            else:
                fields[key] = value_node
        return fields

    def _items(self, node: Any, path: str) -> list[Any]:
        if node is None or _is_null(node):
            return []
        if not isinstance(node, yaml.SequenceNode):
            self._fault(node, path, f"got {_kind(node)}, expected a list")
            return []
        return list(node.value)

    def _text(self, node: Any, path: str) -> str:
        """Any scalar, as it is written: `value: 80` is the text 80."""
        if node is None or _is_null(node):
            return ""
        if not isinstance(node, yaml.ScalarNode):
            self._fault(node, path, f"got {_kind(node)}, expected a text")
            return ""
        return str(node.value)

    def _flag(self, node: Any, path: str) -> bool:
        if node is None or _is_null(node):
            return False
        if not isinstance(node, yaml.ScalarNode) or node.tag != "tag:yaml.org,2002:bool":
            self._fault(node, path, f"got {_shown(getattr(node, 'value', None))}, expected true or false")
            return False
        return str(node.value).lower() in {"true", "yes", "on"}

    def _number(self, node: Any, path: str) -> int:
        text = self._text(node, path)
        if node is None or not (text.isascii() and text.isdigit()) or int(text[:12]) > UINT32_MAX:
            self._fault(node, path, f"got {_shown(text)}, expected a number from 0 to {UINT32_MAX}")
            return 0
        return int(text)

    # Descriptors.

    def _level(self, node: Any, path: str, domain: str, above: str, detail: Detail) -> Level:
        level = Level()
        for index, item in enumerate(self._items(node, path)):
            self._descriptor(item, f"{path}[{index}]", domain, above, level, detail)
        for branch in level.keys.values():
            branch.prefixes = dict(sorted(branch.prefixes.items(), reverse=True))
        return level

    def _descriptor(
        self, node: Any, path: str, domain: str, above: str, level: Level, detail: Detail
    ) -> None:
        fields = self._mapping(node, path, _DESCRIPTOR_KEYS)
        if fields is None:
            return
        key = self._text(fields.get("key"), f"{path}.key")
        value = self._text(fields.get("value"), f"{path}.value")
        if not key or len(key) > NAME_LENGTH_MAX:
            self._fault(fields.get("key", node), f"{path}.key", f"expected 1 to {NAME_LENGTH_MAX} characters")
            return
        if key.endswith("*"):
            message = f"got {_shown(key)}: a wildcard is possible in `value` only"
            self._fault(fields["key"], f"{path}.key", message)
        if len(value) > NAME_LENGTH_MAX:
            self._fault(fields["value"], f"{path}.value", f"longer than {NAME_LENGTH_MAX} characters")
            return
        is_wildcard = value.endswith("*")
        is_shared = self._flag(fields.get("share_threshold"), f"{path}.share_threshold")
        if is_shared and not is_wildcard:
            message = f"needs a `value` that ends in *, got {_shown(value)}"
            self._fault(fields["share_threshold"], f"{path}.share_threshold", message)
        shows_value = self._flag(fields.get("value_to_metric"), f"{path}.value_to_metric")
        if shows_value:
            detail = Detail.MARKED
        text = f"{key}={value}" if value else key
        here = f"{above} > {text}" if above else text
        step = Step(
            rule=self._rule(fields, path, domain, here, detail),
            level=self._level(fields.get("descriptors"), f"{path}.descriptors", domain, here, detail),
            text=text,
            shared=value[:-1] if is_shared and is_wildcard else None,
            shows_value=shows_value,
        )
        if not self._place(level.keys.setdefault(key, Branch()), value, step):
            self._fault(node, path, f"{_shown(here)} is defined twice")

    def _place(self, branch: Branch, value: str, step: Step) -> bool:
        """Put a step where its value belongs. False if there is one already."""
        if not value:
            is_new = branch.default is None
            branch.default = branch.default or step
            return is_new
        if value.endswith("*"):
            steps = branch.prefixes.setdefault(len(value) - 1, {})
            return steps.setdefault(value[:-1], step) is step
        return branch.values.setdefault(value, step) is step

    def _rule(self, fields: dict[str, Any], path: str, domain: str, here: str, detail: Detail) -> Rule | None:
        is_shadow = self._flag(fields.get("shadow_mode"), f"{path}.shadow_mode")
        is_detailed = self._flag(fields.get("detailed_metric"), f"{path}.detailed_metric")
        node = fields.get("rate_limit")
        if node is None or _is_null(node):
            for name, is_set in (("shadow_mode", is_shadow), ("detailed_metric", is_detailed)):
                if is_set:
                    self._fault(fields[name], f"{path}.{name}", "has no effect without rate_limit beside it")
            return None
        place = f"{path}.rate_limit"
        limit = self._mapping(node, place, _LIMIT_KEYS)
        if limit is None:
            return None
        name = self._text(limit.get("name"), f"{place}.name")
        if len(name) > NAME_LENGTH_MAX:
            self._fault(limit["name"], f"{place}.name", f"longer than {NAME_LENGTH_MAX} characters")
        is_unlimited = self._flag(limit.get("unlimited"), f"{place}.unlimited")
        unit, requests_per_unit = self._quota(limit, node, place, is_unlimited)
        replaces = self._replaces(limit.get("replaces"), f"{place}.replaces", name)
        if self.faults:
            return None
        return Rule(
            domain,
            here,
            requests_per_unit,
            unit,
            name=name,
            is_unlimited=is_unlimited,
            is_shadow=is_shadow,
            detail=Detail.ALL if is_detailed else detail,
            replaces=replaces,
        )

    def _quota(self, limit: dict[str, Any], node: Any, place: str, is_unlimited: bool) -> tuple[str, int]:
        if is_unlimited:
            for key in ("unit", "requests_per_unit"):
                if key in limit:
                    self._fault(limit[key], f"{place}.{key}", "cannot be combined with unlimited: true")
            return "", 0
        unit = self._text(limit.get("unit"), f"{place}.unit").lower()
        if unit not in UNITS:
            expected = f"expected one of {', '.join(UNITS)}"
            self._fault(limit.get("unit", node), f"{place}.unit", f"got {_shown(unit)}, {expected}")
        if "requests_per_unit" not in limit:
            self._fault(node, f"{place}.requests_per_unit", "is missing; 0 denies every request")
            return unit, 0
        return unit, self._number(limit["requests_per_unit"], f"{place}.requests_per_unit")

    def _replaces(self, node: Any, path: str, own_name: str) -> frozenset[str]:
        names: set[str] = set()
        for index, item in enumerate(self._items(node, path)):
            place = f"{path}[{index}]"
            fields = self._mapping(item, place, ("name",))
            name = self._text(fields.get("name"), f"{place}.name") if fields else ""
            if not name or name == own_name:
                reason = "the rule itself" if name else "no name"
                self._fault(item, f"{place}.name", f"got {reason}, expected the name of another rule")
            names.add(name)
        return frozenset(names)


def _is_null(node: Any) -> bool:
    return bool(node.tag == "tag:yaml.org,2002:null")


def _kind(node: Any) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return _shown(node.value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _TEXT_SHOWN_MAX else text[: _TEXT_SHOWN_MAX - 3] + "..."
