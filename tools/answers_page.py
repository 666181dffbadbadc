"""Write notebooks/answers.md, the table of fsdp_utils/answers as a page.

python tools/answers_page.py
"""

import re
from pathlib import Path
from typing import Any

from fsdp_utils.answers import table
from fsdp_utils.doctor import findings_table

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
PAGE = NOTEBOOKS / "answers.md"
TOP = """\
# Answers: error messages and questions

Search this page for a part of your message (Ctrl-F), or let the library search:

```sh
python -m fsdp_utils explain < traceback.txt
```

Each message was raised, and its cure run, on two CPU ranks with {versions}, Accelerate 1.15 and
transformers 5.23, by [tests/test_answers.py](../tests/test_answers.py); what CPUs cannot raise says so.
In messages … stands for what varies, # for a number; in code, `sd` is
`torch.distributed.checkpoint.state_dict`, `dcp` `torch.distributed.checkpoint`, `tp`
`torch.distributed.tensor.parallel`, and `FSDP` is FSDP1's class.
The tables are [messages.yaml](../fsdp_utils/answers/messages.yaml) and
[questions.yaml](../fsdp_utils/answers/questions.yaml); `python tools/answers_page.py` writes this page.
"""
FINDINGS = """
# Findings of the doctor

`python -m fsdp_utils doctor train.py` runs a script for a few steps and looks for these;
[tests/test_doctor.py](../tests/test_doctor.py) finds each in a script, and none in its right twin.
The table is [findings.yaml](../fsdp_utils/doctor/findings.yaml).
"""
ORDER = ["FSDP2", "FSDP1", "DTensor", "DeviceMesh", "torch", "DCP", "state dict", "gloo", "NCCL", "CUDA"]
ORDER += ["torchrun", "Accelerate", "transformers", "peft", "Lightning", "torchtitan", "torchao", "Ray"]


def lesson(number: int) -> str:
    """Return a link to a lesson, or its number alone while it is not written."""
    (found,) = [*NOTEBOOKS.glob(f"src/{number:02}_*.py"), None][:1]
    return f"lesson {number}" if found is None else f"[lesson {number}]({found.stem}.ipynb)"


def anchor(heading: str) -> str:
    """Return the name that GitHub and the book give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def message(entry: dict[str, Any]) -> str:
    """Return an entry of a message as markdown."""
    lines = [f"### {entry['id']}", "", "```text", entry["message"], "```", ""]
    if "also" in entry:  # so that a search in the page finds them, too
        lines += ["Other wordings:", "", "```text", *entry["also"], "```", ""]
    lines += [f"{entry['means']}", "", f"**Cause.** {entry['cause']}", "", f"**Cure.** {entry['cure']}", ""]
    if "code" in entry:
        lines += ["```python", entry["code"].rstrip(), "```", ""]
    if "only_with" in entry:
        lines += [f"Not raised by the tests; raised by {entry['only_with']}.", ""]
    if entry.get("follows"):
        lines += ["Mostly the consequence of an error on another rank.", ""]
    lines += [f"See {lesson(entry['lesson'])}.", ""]
    return "\n".join(lines)


def question(entry: dict[str, Any]) -> str:
    """Return an entry of a question as markdown."""
    source = f" Asked: <{entry['source']}>." if "source" in entry else ""
    evidence = f"*Evidence.* {entry['evidence']} See {lesson(entry['lesson'])}.{source}"
    return f"### {entry['question']}\n\n{entry['answer'].strip()}\n\n{evidence}\n"


def finding(entry: dict[str, Any]) -> str:
    """Return an entry of a finding of the doctor as markdown."""
    code = f"\n```python\n{entry['code'].rstrip()}\n```\n" if "code" in entry else ""
    return (
        f"### {entry['id']}\n\n{entry['title']} ({entry['severity']}). {entry['costs']}\n\n"
        f"**Cure.** {entry['cure']}\n{code}\nSee {lesson(entry['lesson'])}.\n"
    )


def page() -> str:
    """Return the page as it should be."""
    parts = [TOP.format(versions=table()["versions"]), "\n# Messages\n"]
    for of in ORDER:
        if own := [entry for entry in table()["messages"] if entry["of"] == of]:
            parts += [f"\n## {of}\n", *(f"\n{message(entry)}" for entry in own)]
    asked = [entry["question"] for entry in table()["questions"]]
    parts += ["\n# Questions\n\n", *(f"- [{one}](#{anchor(one)})\n" for one in asked)]
    parts += [f"\n{question(entry)}" for entry in table()["questions"]]
    parts += [FINDINGS, *(f"\n{finding(entry)}" for entry in findings_table())]
    return (
        "".join(parts).replace("\n# ", "\n## ").replace("\n## Messages", "\n## Messages, by who raises them")
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE.name}: written")
