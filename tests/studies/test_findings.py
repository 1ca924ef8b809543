"""The table of the paper's findings: every command exists, nothing is claimed without a number, the page is current."""

from pathlib import Path

from vitrail.cli import COMMANDS
from vitrail.studies.findings import FINDINGS, render_findings
from vitrail.studies.paper_studies import PAPER_STUDIES

PAGE = Path(__file__).parents[2] / "docs" / "findings.md"


def test_every_command_exists() -> None:
    for finding in FINDINGS:
        program, *words = finding.command.split() or ["-"]
        if program == "vitrail":
            assert words[0] in COMMANDS or " ".join(words[:2]) in COMMANDS, finding.command
        elif program == "python":
            assert (PAGE.parents[1] / words[0]).is_file()


def test_a_verdict_comes_with_a_measurement_and_a_missing_one_with_its_study() -> None:
    for finding in FINDINGS:
        assert bool(finding.here) == (finding.verdict != "not run yet"), finding.claim
    missing = " ".join(finding.command for finding in FINDINGS if not finding.here)
    assert [name for name in PAPER_STUDIES if f"study {name} " not in missing] == []


def test_the_page_of_the_documentation_is_what_the_command_prints() -> None:
    assert render_findings() in PAGE.read_text()
