//! Entry point of the CNI plugin: standard output carries the result, or the error, and nothing else.

use std::{panic, process::ExitCode};

use weir_agent::{
    cni::plugin,
    domain::cni::{CniError, code},
};

fn main() -> ExitCode {
    let outcome = panic::catch_unwind(plugin::run)
        .unwrap_or_else(|_| Err(CniError::new(code::INTERNAL, "weir: the plugin panicked")));
    let (printed, status) = match &outcome {
        Ok(None) => return ExitCode::SUCCESS,
        Ok(Some(result)) => (serde_json::to_string(result), ExitCode::SUCCESS),
        Err(error) => (serde_json::to_string(error), ExitCode::FAILURE),
    };
    println!("{}", printed.unwrap_or_default());
    status
}
