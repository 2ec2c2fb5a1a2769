"""The settings of a run as tools that compare runs take them."""

from shoal.spec.event import Event

MAX_CHARACTERS = 500


def plain_settings(event: Event) -> dict[str, str | float]:
    """Names and values of a `settings` event, as numbers or text; where a value came from stays in the journal."""
    known: dict[str, str | float] = {}
    for name, setting in event.data.items():
        value = setting.get("value") if isinstance(setting, dict) else setting
        if value is not None:
            known[str(name)] = value if isinstance(value, int | float) else str(value)[:MAX_CHARACTERS]
    return known
