"""The words of a script are those that bash gives its commands, and what only a run decides has no value."""

import shutil
import subprocess

import pytest

from workloads.api.errors import UserInputError
from workloads.formats.shell import Script, find_unset, show_unset

# Each ends with the command `show`, which prints its words in bash.
SCRIPTS = {
    "arrays": 'A=(\n  --layers 4  # of (both) kinds\n  --name "a b"\n)\nA+=(--last)\nshow ${A[@]} x "${A[@]}" $A',
    "all words of an array at once": 'A=(1 2)\nshow --sizes="${A[*]}" --first=${A[0]}',
    "text that is split": 'A=" --tp 2\n --pp \'4\' "\nB=$A\nshow $A "$A" $B',
    "added text": 'A="--tp 2"\nA+=" --pp 4"\nshow $A',
    "defaults": 'A=${B:-7}\nC=${A:-8}\nshow $A ${C} "${D-x y}" ${E:=3}',
    "arithmetic": "A=4\nB=$((A * 2 + $A))\nshow $B $((B / 5 % 2)) $((B-1))",
    "quotes": 'A=b\nshow \'$A\' "$A" \\$A "\\$A" a\'b\'"c"',
    "conditions": 'A=8\nif [ "$A" = 8 ]; then B=1; else B=2; fi\nif [[ $A -gt 8 ]]; then C=1; '
    'elif [ -n "$A" ]; then C=2; '
    "else C=3; fi\nif [ -z $A ]; then D=1\nelse D=2\nfi\nshow $B $C $D",
    "a chain ends at its first part": "if [ 1 = 1 ]; then A=1; elif [ 1 = 1 ]; then A=2; else A=3; fi\nshow $A",
    "lists": "A=\n[ -z $A ] && A=1\n[ $A = 2 ] && B=1 || B=2\n{ C=3; }\nshow $A $B $C",
    "other commands": "export A=1\nC=3 D=4\necho --tp 9 >/dev/null\ncat <<EOF >/dev/null\nshow --in a document\nEOF\n"
    "show $A $C $D 2>&1",
    "negation": "A=b\nB=1\nif ! [ $A = b ]; then B=2; fi\nif ! [ $A = c ]; then C=3; fi\nshow $B $C",
    "brackets in a test": 'A=b\nif [[ ( "$A" == b ) ]]; then B=1; fi\nshow x',
    "subshells": "A=1\n(A=2; B=3)\n[ 1 = 2 ] && (A=4; A=5)\nC=$( (A=6) )\nshow $A ${B:-none}",
    "a condition in a subshell": "A=1\nif (A=2; [ 1 = 2 ]); then A=3; fi\nshow $A",
    "a subshell with a case": "A=1\n(case x in x) A=2 ;; esac; A=3)\nshow $A",
    "functions that are subshells": "A=1\nf() (A=2)\nf\nshow $A",
    "assignments for a command alone": "A=1 B=2\nA=3 true\nB=4 C=5 show $A $B ${C:-none}",
    "declarations with options": "declare -a A=(1 2)\nexport -n B=3\nexport C=4 A D=5\nshow ${A[@]} $B $C $D",
    "lists with braces": "[ 1 = 2 ] && { A=1; B=2; } || C=3\n{ D=4; } && E=5\nshow ${A:-none} ${B:-none} $C $D $E",
    "conditions of several commands": "A=1\nif [ $A = 2 ] && [ -d x ]; then A=3; fi\nif [ $A = 1 ] ||\n  [ -d x ];\n"
    "then B=2; fi\n[ $A = 2 ] &&\n  A=4\nshow $A $B",
    "arguments": "set -- 7B 2 '4 5' 6 7 8 9 10 11 12\nA=$2\nshow $1 $A \"$3\" ${10} $10 ${11:-x}",
    "lines that go on": "show --tp \\\n  2 \\\n  --pp 4 | cat",
}


def read_last(text: str) -> list[str]:
    return next(words[1:] for words in reversed(Script(text).read()) if words[0] == "show")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_of_bash(name: str) -> None:
    text = "show() { printf '%s\\0' \"$@\"; }\n" + SCRIPTS[name]
    ended = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
    assert read_last(SCRIPTS[name]) == ended.stdout.split("\0")[:-1]


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("show $TP", "$TP"),
        ('A=" $TP "\nshow $A', "$TP"),
        ("show ${1}", "${1}"),
        ("show $(nproc)", "$(nproc)"),
        ("show $((N * 2))", "$((N * 2))"),
        ("TP=2\nif [ $GPU = h100 ]; then TP=4; fi\nshow $TP", "$TP"),
        ("for TP in 1 2; do\nA=$TP\ndone\nshow $A", "$A"),
        ("test -d x && A=1\nshow $A", "$A"),
        ("A=1\nB=7B\nif [[ $B == 7* ]]; then A=2; fi\nshow $A", "$A"),
        ("A=1\nf() {\n  A=2\n}\nshow $A", "$A"),
        ("A=1\nif [ $S = 70b ]; then A=16; fi\nshow $A", "$A"),
        ("A=1\nif [[ $A < 2 ]]; then A=8; fi\nshow $A", "$A"),
        ("A=1\nfunction f {\n  A=2\n}\nshow $A", "$A"),
        ("A=1\nfunction f() {\n  A=2\n}\nshow $A", "$A"),
        ("A=(2 4)\ni=1\nshow ${A[i]}", "${A[i]}"),
        ("A=1\nfor A in 2 4; do\nB=1\ndone\nshow $A", "$A"),
        ("A=1\nlet A=A*2\nshow $A", "$A"),
        ("A=1\n((A *= 2))\nshow $A", "$A"),
        ("A=1\nread -r A < file\nshow $A", "$A"),
        ("A=1\nunset A\nshow $A", "$A"),
        ("case $1 in\n7B) A=2;;\nesac\nshow $A", "$A"),
        ("A=1\n(cd x) || A=2\nshow $A", "$A"),
        ("A=1\n[ -d x ] && { B=2; A=2; }\nshow $A", "$A"),
        ("A=1\nif [ -d x ]; then B=1; fi && A=2\nshow $A", "$A"),
        ("show <(nproc)", "<(nproc)"),
        ("set -- 1 2\nshift\nshow $1", "$1"),
        ("if [ -d x ]; then set -- 1; fi\nshow $1", "$1"),
    ],
)
def test_a_value_that_only_a_run_has_is_open(text: str, written: str) -> None:
    (word,) = read_last(text)
    assert find_unset(word) == written
    assert show_unset(word) == written


@pytest.mark.parametrize(
    ("kept", "added"), [("A=(--tp 2)", "A+=(--fp8)"), ('A="--tp 2"', 'A+=" --fp8"'), ('A="--tp 2"', 'A="$A --fp8"')]
)
def test_what_is_added_under_a_condition_does_not_hide_what_was_there(kept: str, added: str) -> None:
    *words, last = read_last(f"{kept}\nif [ -n $FP8 ]; then {added}; fi\nshow ${{A[@]}}")
    assert words == ["--tp", "2"]
    assert find_unset(last) == "$A"


def test_nothing_is_executed(tmp_path: object) -> None:
    assert read_last(f"A=$(touch {tmp_path}/made)\ntouch {tmp_path}/made\nshow 1") == ["1"]
    assert not list(tmp_path.iterdir())  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["show 'a", 'show "a', "A=(1 2", "show ${A", "show $((1"])
def test_what_is_not_closed_is_refused(text: str) -> None:
    with pytest.raises(UserInputError, match="not a shell command"):
        Script(text).read()
