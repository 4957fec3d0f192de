"""The sections of our docstrings, in words that griffe's Google parser knows.

`Example:` becomes an example with colours, `Differs from tf.distribute:` a note, and
`Source: URL` a link. A class with `__new__` and without `__init__` shows the parameters
of `__new__`.
"""

from __future__ import annotations

import re

import griffe

SECTIONS = (
    (re.compile(r"^Example:$", re.MULTILINE), "Examples:"),
    (re.compile(r"^(Differs from [\w. ]+):$", re.MULTILINE), r"Differs: \1"),
    (
        re.compile(r"^Source: (https?://\S+)$", re.MULTILINE),
        r"[Where the name comes from](\1)",
    ),
)


class Sections(griffe.Extension):
    """`extensions: [docs/site/sections.py]` in mkdocs.yml loads it."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            for pattern, replacement in SECTIONS:
                obj.docstring.value = pattern.sub(replacement, obj.docstring.value)

    def on_class(self, *, cls: griffe.Class, **_: object) -> None:
        new = cls.members.get("__new__")
        if isinstance(new, griffe.Function) and "__init__" not in cls.members:
            init = griffe.Function(
                "__init__",
                lineno=new.lineno,
                endlineno=new.endlineno,
                parameters=new.parameters,
            )
            cls.set_member("__init__", init)

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        """Where a function has the name of its file, an import means the function.

        An import of that name does not mean the file.
        """
        for module in _modules_in(pkg):
            for name, member in list(module.members.items()):
                where = member.target_path if isinstance(member, griffe.Alias) else ""
                file = _file_at(pkg, where)
                function = where.rpartition(".")[2]
                if file is not None and function in file.members:
                    module.members[name] = griffe.Alias(
                        name, f"{where}.{function}", parent=module
                    )


def _modules_in(module: griffe.Module) -> list[griffe.Module]:
    inner = [
        member
        for member in module.members.values()
        if isinstance(member, griffe.Module)
    ]
    return [module, *(one for each in inner for one in _modules_in(each))]


def _file_at(pkg: griffe.Module, path: str) -> griffe.Module | None:
    """The module of a full name. None: the name is that of something else."""
    first, *rest = path.split(".")
    here: object = pkg if first == pkg.name else None
    for name in rest:
        here = here.members.get(name) if isinstance(here, griffe.Module) else None
    return here if isinstance(here, griffe.Module) and here is not pkg else None
