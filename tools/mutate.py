"""Do the tests notice when the library is wrong? One small change at a time, and the tests run on each.

    python tools/mutate.py fsdp_utils/checkpoint/save.py --tests tests/test_checkpoint_save.py --sample 40

Prints each change that the tests did not notice, and at the end: tried, noticed, not noticed. A change that
makes no difference (an equivalent mutant) is for the reader to tell. The repository itself is not touched:
the changes are made in a copy.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("fsdp_utils", "tests", "benchmarks", "tools", "pyproject.toml")
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}


class Mutation(ast.NodeTransformer):
    """Makes the change with this number, and counts all that are possible.

    Turned round are comparisons, `and` and `or`, arithmetic, `not` and booleans; integers grow by one; a
    `raise`, and a call whose result is not used, are left out.
    """

    def __init__(self, chosen: int = -1) -> None:
        self.chosen = chosen
        self.possible = 0
        self.what = ""

    def _is_chosen(self, node: ast.expr | ast.stmt) -> bool:
        self.possible += 1
        if self.possible - 1 != self.chosen:
            return False
        self.what = f"line {node.lineno}: {ast.unparse(node)}"
        return True

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if self._is_chosen(node):
            node.ops[0] = COMPARISONS[type(node.ops[0])]()
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        if self._is_chosen(node):
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        texts = (ast.Constant, ast.JoinedStr)
        if type(node.op) in OPERATORS and not isinstance(node.left, texts) and self._is_chosen(node):
            node.op = OPERATORS[type(node.op)]()
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return node.operand if isinstance(node.op, ast.Not) and self._is_chosen(node) else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        left_out = isinstance(node.value, ast.Call) and self._is_chosen(node)
        return ast.copy_location(ast.Pass(), node) if left_out else node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        self.generic_visit(node)
        return ast.copy_location(ast.Pass(), node) if self._is_chosen(node) else node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if type(node.value) is int and self._is_chosen(node):
            return ast.copy_location(ast.Constant(node.value + 1), node)
        if type(node.value) is bool and self._is_chosen(node):
            return ast.copy_location(ast.Constant(not node.value), node)
        return node


def pass_tests(copy: Path, tests: list[str], limit_s: float) -> bool:
    """Do the tests pass in the copy? A time-out counts as no."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="files of the library to change")
    parser.add_argument("--tests", nargs="+", required=True, help="what pytest is given")
    parser.add_argument("--sample", type=int, default=40, help="changes to try in each file (40)")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no further change after this (30)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()

    end = time.monotonic() + 60 * given.minutes
    tried, unnoticed = 0, 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
        began = time.monotonic()
        if not pass_tests(copy, given.tests, 600):
            print("The tests fail without any change: nothing can be learned from them.")
            return 2
        limit_s = 30 + 3 * (time.monotonic() - began)
        for file in given.files:
            path = copy / file.resolve().relative_to(ROOT)
            original = path.read_text()
            counter = Mutation()
            counter.visit(ast.parse(original))
            chosen = random.Random(given.seed).sample(
                range(counter.possible), min(given.sample, counter.possible)
            )
            print(f"{file}: {len(chosen)} of {counter.possible} changes", flush=True)
            for number in chosen:
                if time.monotonic() > end:
                    break
                mutation = Mutation(number)
                changed = mutation.visit(ast.parse(original))
                path.write_text(ast.unparse(ast.fix_missing_locations(changed)))
                tried += 1
                if pass_tests(copy, given.tests, limit_s):
                    unnoticed += 1
                    print(f"  not noticed: {mutation.what}", flush=True)
            path.write_text(original)
    print(f"{tried} tried, {tried - unnoticed} noticed, {unnoticed} not noticed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
