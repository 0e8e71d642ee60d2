//! The docs say which test pins which behaviour: the tests must be there.

use std::{fs, path::Path};

/// Every `FILE::TEST` in the table is a function in that file, marked as a test.
#[test]
fn every_test_named_in_the_docs_exists() {
    let docs = include_str!("../../docs/istio-behaviours.md");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let named: Vec<(&str, &str)> =
        docs.split('`').skip(1).step_by(2).filter_map(|code| code.split_once("::")).collect();
    assert!(named.len() > 50, "only {} tests named: has the table another form now?", named.len());
    for (file, test) in named {
        let source =
            fs::read_to_string(root.join(file)).unwrap_or_else(|error| panic!("{file}::{test}: {error}"));
        let lines: Vec<&str> = source.lines().map(str::trim).collect();
        let at = lines.iter().position(|line| {
            line.trim_start_matches("async ")
                .strip_prefix("fn ")
                .is_some_and(|rest| rest.strip_prefix(test).is_some_and(|rest| rest.starts_with('(')))
        });
        let at = at.unwrap_or_else(|| panic!("there is no {test} in {file}"));
        let marked = lines[..at].iter().rev().take_while(|line| line.starts_with(['#', '/']));
        assert!(
            marked.into_iter().any(|line| line.starts_with("#[test") || line.starts_with("#[tokio::test")),
            "{file}::{test} is no test"
        );
    }
}

/// A behaviour is pinned by a test, or the row says why not.
#[test]
fn no_behaviour_is_left_open() {
    let docs = include_str!("../../docs/istio-behaviours.md");
    let rows = docs.lines().filter(|line| line.starts_with("| ") && !line.contains("| here |"));
    for row in rows {
        let here = row.trim_end_matches('|').rsplit('|').next().unwrap_or_default().trim();
        assert!(!here.is_empty(), "{row}");
    }
}
