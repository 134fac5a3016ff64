"""Why something in a plan is as it is; framework-free."""

from __future__ import annotations


class Reason(str):
    """Why a slot has its dtype: a text for people, with the names involved, and a rule.

    Args:
        rule: Short name of the rule that decided, such as "allow" or "no kernel".
        text: The text.

    Example:
        >>> reason = Reason("allow", "MatMul is on the allow list")
        >>> reason.rule, "MatMul" in reason
        ('allow', True)
    """

    __slots__ = ("_rule",)
    _rule: str

    def __new__(cls, rule: str, text: str) -> Reason:
        """Makes a text that knows its rule."""
        reason = super().__new__(cls, text)
        reason._rule = rule
        return reason

    def __reduce__(self) -> tuple[type[Reason], tuple[str, str]]:
        return Reason, (self._rule, str(self))

    @property
    def rule(self) -> str:
        """Short name of the rule that decided."""
        return self._rule

    @property
    def text(self) -> str:
        """The text as a plain string."""
        return str(self)
