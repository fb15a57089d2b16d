"""Write verdicts as JUnit XML, a format that CI systems display."""

from collections import Counter
from collections.abc import Sequence
from xml.etree import ElementTree

PASSED, FAILED, SKIPPED = "system-out", "failure", "skipped"  # the XML element for each outcome of a case


def build_junit(name: str, cases: Sequence[tuple[str, str, str, str]]) -> str:
    """Return a test suite with this name. Each case consists of a group, a name, an outcome and an explanation."""
    counts = Counter(outcome for _, _, outcome, _ in cases)
    numbers = {"tests": len(cases), "failures": counts[FAILED], "skipped": counts[SKIPPED], "errors": 0}
    suite = ElementTree.Element("testsuite", {key: str(number) for key, number in numbers.items()}, name=name)
    for group, case, outcome, line in cases:
        element = ElementTree.SubElement(suite, "testcase", classname=group, name=case)
        explained = {} if outcome == PASSED else {"message": line}
        ElementTree.SubElement(element, outcome, explained).text = line
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
