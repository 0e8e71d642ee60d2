//! Everything that is checked before a change goes in, in one run.

use std::{
    io::{self, BufRead, BufReader, IsTerminal, Write},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::{
    ebpf, packages,
    run::{self, check, step, toolchain},
};

/// Runs all checks, or of the tests only those whose names contain one of the filters, and says whether
/// everything passed. The last thing on stdout is a line with the sum of what the test runners counted.
///
/// A failed check does not keep the others from running, but nothing runs without what it needs.
///
/// # Errors
/// When the tests could not be run: no root, a missing program, or something does not build.
pub fn run(filters: &[String]) -> Result<bool> {
    run::need_root("test")?;
    packages::ensure(packages::TESTS)?;

    let mut report = Report::default();
    report.check("format", || check(toolchain("cargo").args(["fmt", "--all", "--check"])));
    ebpf::build()?;
    report.check("lint of the eBPF programs", ebpf::clippy_quietly);
    // After the objects are built, though it takes none: the agent with and without them are two builds.
    report.check("lint", || check(cargo("clippy").args(["--all-targets", "--", "-D", "warnings"])));
    step("building the programs", || check(cargo("build").arg("--bins")))?;

    // Always the default members, never single packages: another set of packages may mean another set
    // of features of their dependencies, and so another build of all of them.
    report.tests("unit tests", cargo("test").args(["--lib", "--bins"]), &[], filters);
    report.tests("documentation tests", cargo("test").arg("--doc"), &[], filters);
    let mut integration = cargo("test");
    report.tests("integration tests", integration.args(["--test", "*"]), &["--test-threads=2"], filters);
    if filters.is_empty() {
        let mut as_root = cargo("test");
        report.tests(
            "tests of the agent that need root",
            as_root.args(["--test", "zds"]),
            &["--ignored"],
            filters,
        );
    }
    report.finish(filters)
}

fn cargo(subcommand: &str) -> Command {
    let mut command = toolchain("cargo");
    run::name_programs(&mut command).arg(subcommand).args(run::ROOT_TESTS);
    command
}

/// What has been found so far.
#[derive(Default)]
struct Report {
    counts: Counts,
    failed: Vec<String>,
}

impl Report {
    fn check(&mut self, what: &str, work: impl FnOnce() -> Result<()>) {
        self.note(what, step(what, work));
    }

    fn tests(&mut self, what: &str, cargo_test: &mut Command, options: &[&str], filters: &[String]) {
        cargo_test.args(["--no-fail-fast", "--"]).args(options).args(filters);
        if io::stdout().is_terminal() {
            // The runner writes to us, not to the terminal, and would not colour by itself.
            cargo_test.args(["--color", "always"]);
        }
        let counts = &mut self.counts;
        let result = step(what, || run_tests(cargo_test, counts));
        self.note(what, result);
    }

    fn note(&mut self, what: &str, result: Result<()>) {
        if let Err(error) = result {
            eprintln!("    {error:#}");
            self.failed.push(what.to_owned());
        }
    }

    fn finish(self, filters: &[String]) -> Result<bool> {
        let Counts { passed, failed } = self.counts;
        if !self.failed.is_empty() {
            eprintln!("    failed: {}", self.failed.join(", "));
        }
        println!("\n{passed} passed, {failed} failed");
        if !filters.is_empty() && passed + failed == 0 {
            bail!("no test has a name with {}", filters.join(" or "));
        }
        Ok(self.failed.is_empty() && failed == 0)
    }
}

/// Sums of the runners' closing lines.
#[derive(Debug, Default, PartialEq)]
struct Counts {
    passed: u64,
    failed: u64,
}

impl Counts {
    /// Adds what a line of a runner says, if it is a closing line.
    fn add(&mut self, line: &str) {
        let Some((_, counts)) = line.strip_prefix("test result: ").and_then(|rest| rest.split_once(". "))
        else {
            return;
        };
        for count in counts.split("; ") {
            match count.split_once(' ').and_then(|(number, of)| Some((number.parse::<u64>().ok()?, of))) {
                Some((number, "passed")) => self.passed += number,
                Some((number, "failed")) => self.failed += number,
                _ => {}
            }
        }
    }
}

/// Runs a `cargo test`, lets through what it prints, and counts.
fn run_tests(command: &mut Command, counts: &mut Counts) -> Result<()> {
    let line = run::line(command);
    let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| format!("cannot run `{line}`"))?;
    let mut output = BufReader::new(child.stdout.take().context("stdout was asked for")?);
    let mut buffer = Vec::new();
    while output.read_until(b'\n', &mut buffer)? > 0 {
        counts.add(&String::from_utf8_lossy(&buffer));
        let mut stdout = io::stdout();
        stdout.write_all(&buffer).and_then(|()| stdout.flush()).context("cannot write the tests' output")?;
        buffer.clear();
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("`{line}` failed: {status}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::Counts;

    #[test]
    fn closing_lines_are_summed() {
        let mut counts = Counts::default();
        for line in [
            "running 4 tests\n",
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s\n",
            "test result: \u{1b}[31mFAILED\u{1b}[m. 2 passed; 5 failed; 0 ignored; 0 measured; 7 filtered out\n",
            "note: test result: ok. 9 passed; 9 failed\n",
            "test result: what\n",
        ] {
            counts.add(line);
        }
        assert_eq!(counts, Counts { passed: 5, failed: 5 });
    }
}
