"""Which mistakes can be made in a file, and what the file looks like with one of them.

A mistake changes one expression or one statement inside of a function. The function and
a number say where it is, not a line: a file may be formatted again between two
measurements.
"""

from __future__ import annotations

import ast
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef

TURNED_ROUND: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
# Arguments by name that say where something is, of which type it is, or who is meant.
PLACES = {"device", "dtype", "group", "dst", "src", "dim", "axis", "rank", "worker"}


class Mistake(NamedTuple):
    """One change of the package."""

    path: str  # of the file, in the package's folder
    function: str  # its name, behind those of the classes and functions around it
    number: int  # of the mistake, among those that can be made in this function
    kind: str
    line: int  # where the change begins; the lines that a test reaches are these
    last_line: int
    before: str
    after: str


class _Change(NamedTuple):
    """A node, and the text that takes its place."""

    kind: str
    node: ast.expr | ast.stmt
    after: str
    statement: ast.stmt  # the one that holds the node: its lines are reached or not


def find_mistakes(path: Path, folder: Path) -> list[Mistake]:
    """All mistakes that can be made in the functions of a file."""
    found: list[Mistake] = []
    for name, function in _named_functions(ast.parse(path.read_text()), ""):
        for number, change in enumerate(_changes_of(function)):
            first, last = _lines_of(change.statement)
            relative = str(path.relative_to(folder))
            found.append(
                Mistake(
                    relative,
                    name,
                    number,
                    change.kind,
                    first,
                    last,
                    ast.unparse(change.node),
                    change.after,
                )
            )
    return found


def make_mistake(source: str, mistake: Mistake) -> str:
    """The text of the file with the mistake in it.

    Raises:
        LookupError: The file has no such function, or the function changed since.
    """
    for name, function in _named_functions(ast.parse(source), ""):
        if name != mistake.function:
            continue
        changes = list(_changes_of(function))
        if mistake.number >= len(changes):
            continue
        change = changes[mistake.number]
        if (change.kind, ast.unparse(change.node)) == (mistake.kind, mistake.before):
            return _replace(source, change)
    raise LookupError(f"{mistake.path} has no {mistake.function} as it was")


def choose_mistakes(folder: Path, count: int, seed: int) -> list[Mistake]:
    """So many mistakes: each file gets its share by size, each of its kinds a chance.

    The choice depends on the files and the seed alone.
    """
    draw = random.Random(seed)
    of_file: list[list[Mistake]] = []
    sizes: list[int] = []
    for path in sorted(folder.rglob("*.py")):
        found = find_mistakes(path, folder)
        if found:
            of_file.append(found)
            sizes.append(len(path.read_text().splitlines()))
    chosen: list[Mistake] = []
    # One point in each of `count` equal parts of the package, file after file: a large
    # file has many such points, and of small files only some have one.
    part = sum(sizes) / count
    start = 0.0
    for found, size in zip(of_file, sizes, strict=True):
        points = int((start + size) / part) - int(start / part)
        start += size
        for _ in range(min(points, len(found))):
            kind = draw.choice(sorted({mistake.kind for mistake in found}))
            mistake = draw.choice([one for one in found if one.kind == kind])
            found.remove(mistake)
            chosen.append(mistake)
    return chosen


def _named_functions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    """Each outermost function of a file or a class; nested ones belong to it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _named_functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from _named_functions(node, prefix)


def _changes_of(function: Function) -> Iterator[_Change]:
    """Everything that can be changed in the body of a function, in the order of it."""
    for statement in _statements_of(function.body):
        yield from _changed_statement(statement)
        for expression in _own_expressions(statement):
            for node in ast.walk(expression):
                yield from _changed_expression(node, statement)


def _statements_of(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        for inner in ("body", "orelse", "finalbody"):
            yield from _statements_of(getattr(statement, inner, []))
        for handler in getattr(statement, "handlers", []):
            yield from _statements_of(handler.body)


def _own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """What a statement computes, without its types and the statements inside of it."""
    for name, value in ast.iter_fields(statement):
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, ast.expr) and name not in ("annotation", "returns"):
                yield child
            elif isinstance(child, ast.withitem):
                yield child.context_expr


def _changed_statement(statement: ast.stmt) -> Iterator[_Change]:
    match statement:
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield _Change("call removed", statement, "pass", statement)
        case ast.Assign(targets=[ast.Attribute()]) | ast.AugAssign():
            yield _Change("write removed", statement, "pass", statement)
        case ast.Continue():
            yield _Change("loop left", statement, "break", statement)
        case ast.Return(value=ast.expr() as value) if not _is_nothing(value):
            yield _Change("nothing returned", statement, "return None", statement)
        case ast.If(test=test) | ast.While(test=test):
            turned = f"not ({ast.unparse(test)})"
            yield _Change("condition turned round", test, turned, statement)


def _changed_expression(node: ast.AST, statement: ast.stmt) -> Iterator[_Change]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            turned = ast.Compare(left, [TURNED_ROUND[type(op)]()], [right])
            yield _Change("comparison turned round", node, _text(turned), statement)
        case ast.BinOp(op=ast.Mult() | ast.Div()) if not _is_joined(node.left):
            yield _Change("factor left out", node, _text(node.left), statement)
        case ast.BinOp(op=ast.Add()) if not _joins(node):
            other = ast.BinOp(node.left, ast.Sub(), node.right)
            yield _Change("sign turned round", node, _text(other), statement)
        case ast.BoolOp(op=ast.And() as op, values=values):
            other = ast.BoolOp(ast.Or(), values)
            yield _Change("and for or", node, _text(other), statement)
        case ast.BoolOp(op=ast.Or(), values=values):
            other = ast.BoolOp(ast.And(), values)
            yield _Change("and for or", node, _text(other), statement)
        case ast.Subscript(slice=ast.Name(), ctx=ast.Load()):
            first = ast.Subscript(node.value, ast.Constant(0), ast.Load())
            yield _Change("the first in place of one", node, _text(first), statement)
        case ast.Constant(value=bool() as value):
            yield _Change("flag turned round", node, repr(not value), statement)
        case ast.Constant(value=int() as value):
            yield _Change("off by one", node, repr(value + 1), statement)
        case ast.Call(keywords=keywords) if _forgettable(keywords):
            kept = [key for key in keywords if key.arg not in PLACES]
            call = ast.Call(node.func, node.args, kept)
            yield _Change("place forgotten", node, _text(call), statement)


def _forgettable(keywords: list[ast.keyword]) -> bool:
    return any(keyword.arg in PLACES for keyword in keywords)


def _is_nothing(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _is_joined(value: ast.expr) -> bool:
    """Whether it is a text or a list, which `+` joins: `-` would only be an error."""
    is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
    return is_text or isinstance(value, (ast.JoinedStr, ast.List, ast.ListComp))


def _joins(node: ast.BinOp) -> bool:
    return _is_joined(node.left) or _is_joined(node.right)


def _text(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


def _lines_of(statement: ast.stmt) -> tuple[int, int]:
    """The lines of a statement, or of its head if it holds others."""
    body = getattr(statement, "body", None)
    if isinstance(body, list) and body:
        return statement.lineno, max(statement.lineno, body[0].lineno - 1)
    return statement.lineno, statement.end_lineno or statement.lineno


def _replace(source: str, change: _Change) -> str:
    """The source with the change made.

    Lines behind it keep their numbers: tests compare tracebacks.
    """
    lines = source.encode().splitlines(keepends=True)
    node = change.node
    assert node.end_lineno is not None and node.end_col_offset is not None
    head = b"".join(lines[: node.lineno - 1])
    head += lines[node.lineno - 1][: node.col_offset]
    tail = lines[node.end_lineno - 1][node.end_col_offset :]
    tail += b"".join(lines[node.end_lineno :])
    gone = node.end_lineno - node.lineno
    after = change.after
    if isinstance(node, ast.expr) and gone:
        after = f"({after}{chr(10) * gone})"
    elif gone:
        tail = tail.replace(b"\n", b"\n" * (gone + 1), 1)
    text = (head + after.encode() + tail).decode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as that of `x is 1`
        compile(text, "<mistake>", "exec")
    return text
