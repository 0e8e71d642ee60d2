//! Entry point of `weir`.

use std::process::ExitCode;

fn main() -> ExitCode {
    weir_agent::cli::run()
}
