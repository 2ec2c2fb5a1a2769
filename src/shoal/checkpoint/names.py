"""Names of weights as the model itself would call them, without what wrappers add."""

from collections.abc import Iterable

# torch.compile, FSDP and activation checkpointing put a component of their own into the path.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Each name and its plain form: `module._orig_mod.fc.weight` is `fc.weight`.

    `module.` (DistributedDataParallel) is dropped only in front, and only if every name has it: a model may well
    have a layer called `module` among others. If two names would become one, all of them stay as they are.
    """
    plain = {name: ".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in names}
    while plain and all(name.startswith("module.") for name in plain.values()):
        plain = {name: short.removeprefix("module.") for name, short in plain.items()}
    if len(set(plain.values())) < len(plain) or "" in plain.values():
        return {name: name for name in plain}
    return plain
