"""The doctor tries things, says what to do, exits by what it found."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import infinity.cli.doctor as examination
from infinity.cli.findings import Finding, Probe, Verdict, fail, ok, warn
from infinity.cli.main import app


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    return result.exit_code, result.stdout


def fake(monkeypatch: pytest.MonkeyPatch, *findings: Finding | Exception) -> None:
    def probes(_: object) -> list[tuple[str, Probe]]:
        def one(finding: Finding | Exception) -> Probe:
            def probe() -> Iterator[Finding]:
                if isinstance(finding, Exception):
                    raise finding
                yield finding

            return probe

        return [(f"probe {index}", one(finding)) for index, finding in enumerate(findings)]

    monkeypatch.setattr(examination, "probes", probes)


def test_a_failed_finding_exits_1_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, ok("a", "fine"), fail("disk [x]", "is [full]", "free some"), warn("b", "so so", "look"))
    code, text = run()
    assert code == 1
    assert "is [full]" in text
    assert "→ free some" in text
    assert "1 OK · 1 WARN · 1 FAIL" in text


def test_warnings_alone_exit_0(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, ok("a", "fine"), warn("b", "so so", "look"))
    assert run()[0] == 0


def test_a_probe_that_raises_is_a_finding_and_the_others_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, RuntimeError("the driver\nsaid no"), ok("after", "fine"))
    code, text = run("--json")
    report = json.loads(text)
    assert code == 1
    assert report["ok"] is False
    assert report["findings"][0]["check"] == "probe 0"
    assert "RuntimeError: the driver said no" in report["findings"][0]["found"]
    assert report["findings"][1] == {"check": "after", "verdict": "OK", "found": "fine", "remedy": None}


def test_the_real_probes_give_the_schema_and_remedies(tmp_path: Path) -> None:
    code, text = run("--json", str(tmp_path), str(tmp_path / "missing"))
    report = json.loads(text)
    assert set(report) == {"ok", "findings"}
    for finding in report["findings"]:
        assert set(finding) == {"check", "verdict", "found", "remedy"}
        assert finding["verdict"] in {verdict.value for verdict in Verdict}
        assert (finding["remedy"] is None) == (finding["verdict"] == "OK")
    failed = [finding for finding in report["findings"] if finding["verdict"] == "FAIL"]
    assert [finding["check"] for finding in failed] == [f"path {tmp_path / 'missing'}"]
    assert failed[0]["remedy"] == f"mkdir -p {tmp_path / 'missing'}"
    assert code == 1
    tried = {finding["check"] for finding in report["findings"]}
    assert {"Adam", "OpenMP", "I/O io_uring", "I/O aio", "aio-max-nr", "memlock", "cgroup", "/dev/shm"} <= tried
    assert list(tmp_path.iterdir()) == []


def test_memory_is_no_place_for_swap_files() -> None:
    finding = next(iter(examination.swap_path(Path("/dev/shm"))))
    assert finding.verdict is Verdict.WARN
    assert "take RAM" in finding.found


def test_a_foreign_package_of_the_same_name_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "infinity").mkdir()
    (tmp_path / "infinity" / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    shadow = f"a foreign `infinity` can shadow this one: {tmp_path / 'infinity' / '__init__.py'}"
    assert [finding.found for finding in examination.package() if finding.verdict is Verdict.WARN] == [shadow]


def test_a_kernel_that_differs_from_pytorch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from infinity._native import cpu_adam

    class Wrong(cpu_adam.TorchKernels):
        def adam(self, master, *rest) -> None:  # type: ignore[no-untyped-def]
            super().adam(master, *rest)
            master[17] += 1e-6

    monkeypatch.setattr(cpu_adam, "open_kernels", Wrong)
    assert [finding.verdict for finding in examination.native_libraries()][-1] is Verdict.FAIL
