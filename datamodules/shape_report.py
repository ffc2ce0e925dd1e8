"""What was found in a shape that someone hands in, what of it was mended, and what forbids a prediction."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

ALL = "all"
"""The name that asks for every repair."""


@dataclass(frozen=True)
class Finding:
    """One thing found in a shape.

    Attributes:
        name: what ``repair`` and ``accept`` call it.
        level: "note" (nothing to worry about), "mended", "warning" (used as it is) or "error" (no prediction).
        found: what was found and, if that is unclear, what was expected.
        remedy: what a repair does, or did.
    """

    name: str
    level: str
    found: str
    remedy: str = ""


class ShapeError(ValueError):
    """A shape that cannot be used as it is; the message lists everything that was found and how to mend it.

    Args:
        report: what was found.
    """

    def __init__(self, report: ShapeReport) -> None:
        self.report = report
        wrong = [finding.name for finding in report.findings if finding.level == "error"]
        mendable = [name for name in wrong if name in report.repairs]
        text = f"this shape cannot be used as it is:\n{report}"
        if mendable:
            names = ",".join(mendable)
            text += f"\nmend it with --repair {names} (repair={mendable}), or insist on it with --accept {names}"
        super().__init__(text)


class ShapeReport:
    """Gathers findings, and knows which repairs were asked for.

    Args:
        shape: the shape's name, for the table's heading.
        repairs: names of all repairs that shapes of this kind know.
        repair: those asked for; "all" stands for every one.
        accept: faults that are to be used as they are, though they would forbid a prediction.

    Raises:
        ValueError: a name is unknown.
    """

    def __init__(
        self, shape: str, repairs: Collection[str], repair: Collection[str] = (), accept: Collection[str] = ()
    ) -> None:
        self.shape = shape
        self.repairs = tuple(repairs)
        self.findings: list[Finding] = []
        for argument, names in (("repair", repair), ("accept", accept)):
            unknown = sorted(set(names) - {*self.repairs, ALL})
            if unknown:
                raise ValueError(f"{argument}: expected names among {', '.join([*self.repairs, ALL])}, found {unknown}")
        self._repair = set(self.repairs) if ALL in repair else set(repair)
        self._accept = set(self.repairs) - self._repair if ALL in accept else set(accept)

    def __str__(self) -> str:
        if not self.findings:
            return f"{self.shape}: nothing to remark"
        rows = []
        for finding in self.findings:
            remedy = finding.remedy
            if remedy and finding.level in ("warning", "error") and finding.name in self.repairs:
                remedy = f"--repair {finding.name}: {remedy}"
            rows.append((finding.level, finding.name, finding.found + (f" [{remedy}]" if remedy else "")))
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        lines = [f"  {level:<{widths[0]}}  {name:<{widths[1]}}  {text}" for level, name, text in rows]
        return "\n".join([f"{self.shape}:", *lines])

    def names(self, level: str) -> list[str]:
        """Names of the findings of a level."""
        return [finding.name for finding in self.findings if finding.level == level]

    def note(self, name: str, found: str) -> None:
        """Remark something that needs no mending."""
        self.findings.append(Finding(name, "note", found))

    def warn(self, name: str, found: str, remedy: str) -> bool:
        """Remark a fault that a prediction can live with; returns whether it is to be mended."""
        mend = name in self._repair
        self.findings.append(Finding(name, "mended" if mend else "warning", found, remedy))
        return mend

    def fault(self, name: str, found: str, remedy: str) -> bool:
        """Remark a fault that makes predictions meaningless; returns whether to go on as if it were mended.

        It is mended if asked for, and left if accepted. Else :meth:`refuse` will raise, and further checks are made of
        what the repair would give.
        """
        mend, accepted = name in self._repair, name in self._accept
        level = "mended" if mend else "warning" if accepted else "error"
        self.findings.append(Finding(name, level, found, remedy))
        return mend or not accepted

    def refuse(self) -> None:
        """Raise a :class:`ShapeError` if a fault was neither mended nor accepted."""
        if self.names("error"):
            raise ShapeError(self)
