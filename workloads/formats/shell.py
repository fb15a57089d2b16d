"""Read the commands of a shell script, with variables and arrays expanded as in bash. Nothing is executed."""

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from workloads.api.errors import UserInputError

# A value known only at run time is kept as its expansion's text between these characters, which no script contains.
UNSET, END = "\ue000", "\ue001"
_UNSET = re.compile(f"{UNSET}(.*?){END}", re.DOTALL)
_SPACES = re.compile(f"\\s+(?![^{UNSET}]*{END})")  # spaces between words, not inside an unset expansion
_SPACE = re.compile(r"(?:[ \t\r]|\\\r?\n)+")
_BETWEEN_VALUES = re.compile(r"(?:\s|\\\r?\n)+")
_COMMENT = re.compile(r"#[^\n]*")
_OPERATOR = re.compile(r";;&?|&&|\|\||<<<|[;&|\n()<>]")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_REDIRECTION = re.compile(r"\d*(?:&?>>?&?|<&?)")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_SIMPLE = re.compile(r"\$([A-Za-z_]\w*|\d|[@*#?$!-])")
_BRACED = re.compile(r"(\w+|[@*])(?:\[([@*]|\w+)\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_NAMES = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.FloorDiv: "floordiv", ast.Mod: "mod"}
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {kind: getattr(operator, name) for kind, name in _NAMES.items()}
_OPENING = {"if", "for", "while", "until", "case", "select", "{"}
_CLOSING = {"fi", "done", "esac", "}"}
_BETWEEN = {"then", "else", "elif", "do", "!", "time"}
_TEXT_TESTS = {"=": operator.eq, "==": operator.eq, "!=": operator.ne}
_NUMBER_TESTS = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "gt", "lt", "ge", "le")}
_DECLARING = {"export", "declare", "local", "readonly", "typeset"}
_CHANGING = {"let", "read", "unset", "mapfile", "readarray"}  # commands that change variables
_CHANGED = re.compile(r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)")
_PRINTING = {"echo", "printf", "cat", ":"}
Fields = list[tuple[str, bool]]  # pieces of a word, and whether each is quoted; unquoted pieces are split at spaces


@dataclass
class _Block:
    """A compound command: a conditional, a loop, braces or a subshell."""

    is_executed: bool | None  # whether the current part is executed; None if unknown
    is_done: bool | None = None  # whether an earlier part of a conditional was executed
    # The state of the enclosing list before this block.
    guard: bool | None = True
    result: bool | None = True
    is_negated: bool = False
    is_bracket: bool = False
    outer: dict[str, list[str]] | None = None  # variables outside a subshell


@dataclass
class Script:
    """Reads a script command by command."""

    text: str
    commands: list[list[str]] = field(default_factory=list)  # each command is a list of expanded words
    variables: dict[str, list[str]] = field(default_factory=dict)
    _position: int = 0
    _guard: bool | None = True  # whether a command after `&&` or `||` is executed
    _result: bool | None = True  # the last command's result
    _is_function: bool = False  # the next braces are the body of a function
    _is_negated: bool = False  # whether `!` precedes the command
    _names_variable: bool = False  # the next word is the variable of a loop
    _is_declaring: bool = False  # words are names, options and assignments of `export` or `declare`
    _is_closed: bool = False  # a block ends the command
    _blocks: list[_Block] = field(default_factory=list)
    _hidden: dict[str, list[str] | None] = field(default_factory=dict)  # values replaced by the command's assignments

    def read(self) -> list[list[str]]:
        """Return each command's words. Raises UserInputError if a quote or a bracket is not closed."""
        words: list[str] = []
        while self._position < len(self.text):
            if self._skip(_SPACE) or (self._at_word_start() and self._skip(_COMMENT)):
                continue
            if words[:1] == ["[["] and self.text[self._position] in "<>":  # a comparison
                words.append(self.text[self._position])
                self._position += 1
            elif not words and self._text_at("(("):
                stop = _find_end(self.text, self._position, "()")
                for name in _CHANGED.findall(self.text[self._position : stop]):
                    self._forget(name)
                self._position = stop
                words = ["(("]
            elif match := _HEREDOC.match(self.text, self._position):
                end = re.compile(rf"^\t*{match[2]}[ \t]*$", re.MULTILINE).search(self.text, match.end())
                self._position = match.end() if end is None else end.end()
            elif self._text_at("<(") or self._text_at(">("):
                start, self._position = self._position, _find_end(self.text, self._position + 1, "()")
                words.append(f"{UNSET}{self.text[start : self._position]}{END}")
            elif self._skip(_REDIRECTION):
                self._skip(_SPACE)
                self._read_word()
            elif match := _OPERATOR.match(self.text, self._position):
                self._position = match.end()
                if match[0] == "(":
                    self._open_bracket(words)
                else:
                    self._end_command(words, match[0])
                    if match[0] == ")" and self._blocks and self._blocks[-1].is_bracket:
                        self._close()
                words = []
            elif not words and (match := _ASSIGNMENT.match(self.text, self._position)):
                self._position = match.end()
                self._hidden.setdefault(match[1], self.variables.get(match[1]))
                self._assign(match[1], self._read_value(), is_added=bool(match[2]))
            else:
                if not words and not self._is_declaring:
                    self._restore()
                words += self._split(self._read_word())
                if self._is_declaring or (words[:1] and words[0] in _DECLARING):
                    self._is_declaring = True
                    words = []
                elif words and words[0] in _OPENING | _CLOSING | _BETWEEN and len(words) == 1:
                    self._enter(words[0])
                    words = []
                elif words[:1] == ["function"] and words[-1] == "{":
                    self._is_function = True
                    self._enter("{")
                    words = []
        self._end_command(words, "\n")
        return self.commands

    def _end_command(self, words: list[str], end: str) -> None:
        is_command = bool(words or self._hidden or self._is_declaring)
        if end == "\n" and not is_command and not self._is_closed:
            return  # the list continues
        for name in words[:1] if self._names_variable else words[1:] if words[:1] and words[0] in _CHANGING else ():
            self._forget(name.partition("=")[0].rstrip("+-*/%"))
        self._names_variable = False
        if words[:2] == ["set", "--"] or words[:1] == ["shift"]:  # changes `$1` and later parameters
            self.variables = {name: values for name, values in self.variables.items() if not name.isdigit()}
            if words[0] == "set" and all(self._conditions):
                self.variables |= {str(number): [word] for number, word in enumerate(words[2:], 1)}
        if words and words[0] not in _PRINTING and False not in self._conditions:
            self.commands.append(words)
        if self._guard is not False and is_command:  # a list's result is its last executed command's result
            self._result = None if self._guard is None else _test(words)
            if self._is_negated and self._result is not None:
                self._result = not self._result
        self._is_negated = self._is_declaring = self._is_closed = False
        self._hidden = {}
        self._guard = True
        if end in ("&&", "||"):
            self._guard = self._result if self._result is None or end == "&&" else not self._result
        self._is_function = (
            (end == "(" and len(words) == 1) or words[:1] == ["function"] or (self._is_function and end in ")\n")
        )

    @property
    def _conditions(self) -> tuple[bool | None, ...]:
        return (*(block.is_executed for block in self._blocks), self._guard)

    def _restore(self) -> None:
        variables = self.variables | self._hidden
        self.variables = {name: values for name, values in variables.items() if values is not None}
        self._hidden = {}

    def _open(self, is_executed: bool | None, **values: Any) -> None:
        block = _Block(is_executed, guard=self._guard, result=self._result, is_negated=self._is_negated, **values)
        self._blocks.append(block)
        self._guard, self._is_negated = True, False

    def _open_bracket(self, words: list[str]) -> None:
        """Open a subshell, or the parentheses after a word: empty, as in `f()`, or those of a test's expression."""
        is_executed = None if self._is_function and not words else self._guard
        if words:
            self._end_command(words, "(")
        self._open(is_executed, is_bracket=True, outer=None if words else dict(self.variables))

    def _close(self) -> None:
        block = self._blocks.pop()
        self.variables = self.variables if block.outer is None else block.outer
        if block.guard is not True:
            self._result = None if block.guard is None else block.result
        elif block.is_negated and self._result is not None:
            self._result = not self._result
        self._guard, self._is_closed = block.guard, True

    def _enter(self, word: str) -> None:
        if word in _OPENING:
            is_known = word == "{" and not self._is_function
            self._open(self._guard if is_known else None, is_done=False if word == "if" else None)
            self._names_variable = word in ("for", "select")
        elif word == "!":
            self._is_negated = True
        elif not self._blocks:
            return
        elif word in _CLOSING:
            self._close()
            self._result = self._result if word == "}" else None
        elif word in ("then", "else"):
            block = self._blocks[-1]
            done = block.is_done
            now = self._result if word == "then" else True
            now = False if done else now if done is False or now is False else None
            block.is_executed = now
            block.is_done = True if done or now else None if None in (done, now) else False

    def _text_at(self, text: str) -> bool:
        return self.text.startswith(text, self._position)

    def _at_word_start(self) -> bool:
        return self._position == 0 or self.text[self._position - 1] in " \t\n;&|()"

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        if match := pattern.match(self.text, self._position):
            self._position = match.end()
        return match is not None

    def _assign(self, name: str, values: list[str], *, is_added: bool) -> None:
        old, conditions = self.variables.get(name, []), self._conditions
        is_array = self.text[self._position - 1] == ")"
        if False in conditions:
            return
        if None in conditions:  # values added under a condition are unknown; values that are set count as unset
            unset = f"{UNSET}${name}{END}"
            is_added = is_added or bool(old and old[0] and values[:1] and values[0].startswith(f"{old[0]} "))
            values = [unset] if is_array or not is_added else [f" {unset}"]
        if not is_added or not old:
            self.variables[name] = values
        else:
            self.variables[name] = old + values if is_array else [old[0] + "".join(values), *old[1:]]

    def _forget(self, name: str) -> None:
        if name in self.variables:
            self.variables[name] = [f"{UNSET}${name}{END}"]

    def _read_value(self) -> list[str]:
        if not self._text_at("("):
            return ["".join(text for text, _ in self._read_word())]
        self._position += 1
        values: list[str] = []
        while not self._text_at(")"):
            if self._position >= len(self.text):
                raise UserInputError("not a shell command: a bracket is not closed")
            if not (self._skip(_BETWEEN_VALUES) or (self._at_word_start() and self._skip(_COMMENT))):
                start = self._position
                values += self._split(self._read_word())
                self._position += self._position == start  # skips a character that no word can contain
        self._position += 1
        return values

    def _read_word(self) -> Fields:
        pieces: Fields = []
        while self._position < len(self.text) and self.text[self._position] not in " \t\r\n;&|()<>":
            character = self.text[self._position]
            if character == "'":
                pieces.append((self._take_until("'"), True))
            elif character == '"':
                pieces += [("", True), *self._read_quoted()]
            elif character == "\\":
                pieces.append((self.text[self._position + 1 : self._position + 2].replace("\n", ""), True))
                self._position += 2
            elif character == UNSET:  # already expanded text
                pieces.append((UNSET + self._take_until(END) + END, True))
            elif character in "$`":
                pieces += [(text, False) for text in self._expand()]
            else:
                pieces.append((character, False))
                self._position += 1
        return pieces

    def _take_until(self, end: str) -> str:
        start = self._position + 1
        if (stop := self.text.find(end, start)) < 0:
            raise UserInputError("not a shell command: No closing quotation")
        self._position = stop + 1
        return self.text[start:stop]

    def _read_quoted(self) -> Fields:
        pieces: Fields = []
        self._position += 1
        while not self._text_at('"'):
            if self._position >= len(self.text):
                raise UserInputError("not a shell command: No closing quotation")
            if self.text[self._position] == "\\" and self.text[self._position + 1 : self._position + 2] in '"\\$`\n':
                pieces.append((self.text[self._position + 1].replace("\n", ""), True))
                self._position += 2
            elif self.text[self._position] in "$`":
                is_array = "[@]" in self.text[self._position : self.text.find("}", self._position)]
                pieces += [(text, not (is_array and text == " ")) for text in self._expand()]
            else:
                pieces.append((self.text[self._position], True))
                self._position += 1
        self._position += 1
        return pieces

    def _expand(self) -> Iterator[str]:
        text, start = self.text, self._position
        if text.startswith("$((", start):
            end = _find_end(text, start + 1, "()")
            self._position = end
            yield self._compute(text[start + 3 : end - 2])
        elif text.startswith("$(", start) or text[start] == "`":
            self._position = _find_end(text, start + 1, "()") if text[start] == "$" else text.find("`", start + 1) + 1
            if not self._position:
                raise UserInputError("not a shell command: No closing quotation")
            yield f"{UNSET}{text[start : self._position]}{END}"
        elif text.startswith("${", start):
            self._position = _find_end(text, start + 1, "{}")
            values = self._look_up(text[start + 2 : self._position - 1], text[start : self._position])
            yield from [part for value in values for part in (" ", value)][1:]
        elif match := _SIMPLE.match(text, start):
            self._position = match.end()
            yield from self._look_up(match[1], match[0])[:1]
        else:
            self._position += 1
            yield "$"

    def _look_up(self, inner: str, written: str) -> list[str]:
        match = _BRACED.fullmatch(inner)
        values = self.variables.get(match[1]) if match else None
        unset = [f"{UNSET}{written}{END}"]
        if match is None or (match[2] and match[2] not in "@*" and not match[2].isdigit()):
            return unset
        if values is not None and match[2] and match[2].isdigit():
            values = values[int(match[2]) : int(match[2]) + 1] or None
        elif values is not None and match[2] is None:
            values = values[:1]
        if match[3] and match[3][-1] in "-=" and (values is None or (match[3][0] == ":" and values in ([], [""]))):
            return ["".join(text for text, _ in Script(match[4], [], self.variables)._read_all())]
        if match[3] and match[3][-1] == "+":
            return unset
        return unset if values is None else values

    def _read_all(self) -> Fields:
        self.text = self.text.strip("\"'")
        self.text += '"'
        self._position = -1
        return self._read_quoted()

    def _compute(self, expression: str) -> str:
        expanded = "".join(text for text, _ in Script(expression, [], self.variables)._read_all())
        expanded = re.sub(r"[A-Za-z_]\w*", lambda name: "".join(self._look_up(name[0], name[0])[:1]), expanded)
        try:
            return str(_evaluate(ast.parse(expanded.replace("/", "//").strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return f"{UNSET}$(({expression})){END}"

    def _split(self, pieces: Fields) -> list[str]:
        words, is_open = list[str](), False
        for text, is_quoted in pieces:
            parts = [text] if is_quoted else _SPACES.split(text)
            for number, part in enumerate(parts):
                if number:
                    is_open = False
                if part or is_quoted:
                    words = [*words[:-1], words[-1] + part] if is_open else [*words, part]
                    is_open = True
        return words


def find_unset(text: str) -> str | None:
    """Return a word's first expansion for which the script has no value, or None if there is none."""
    match = _UNSET.search(text)
    return None if match is None else match[1]


def show_unset(text: str) -> str:
    """Return a word with its unset expansions as written in the script."""
    return _UNSET.sub(r"\1", text)


def _test(words: list[str]) -> bool | None:
    if not words:
        return True  # an assignment
    if words[0] not in ("[", "[[", "test") or any(UNSET in word for word in words):
        return None
    is_pattern = words[0] == "[[" and len(words) > 1 and any(character in words[-2] for character in "*?[")
    words = [word for word in words[1:] if word not in ("]", "]]")]
    if len(words) == 1 or (len(words) == 2 and words[0] in ("-n", "-z")):
        return bool(words[-1]) == (words[0] != "-z" or len(words) == 1)
    if len(words) != 3 or is_pattern:
        return None
    left, name, right = words
    if name in _TEXT_TESTS:
        return bool(_TEXT_TESTS[name](left, right))
    is_number = name in _NUMBER_TESTS and all(re.fullmatch(r"-?\d+", text) for text in (left, right))
    return bool(_NUMBER_TESTS[name](int(left), int(right))) if is_number else None


def _find_end(text: str, start: int, brackets: str) -> int:
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] == brackets[0]) - (text[position] == brackets[1])
        if depth == 0:
            return position + 1
    raise UserInputError("not a shell command: a bracket is not closed")


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return int(_ARITHMETIC[type(node.op)](_evaluate(node.left), _evaluate(node.right)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    raise ValueError("not a sum of whole numbers")
