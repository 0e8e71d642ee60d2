//! Small programs that tests need as processes of their own: a pod's first process, the kubelet's probe.

use std::{io::Read, net::SocketAddr, process::ExitCode};

use weir_tests::app::Client;

const USAGE: &str = "usage: weir-gear pause | weir-gear probe ADDRESS:PORT";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        // Until the parent closes its end.
        ["pause"] => {
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            ExitCode::SUCCESS
        }
        ["probe", address] => match address.parse::<SocketAddr>() {
            Ok(address) => probe(address),
            Err(error) => fail(&format!("{address}: {error}")),
        },
        _ => fail(USAGE),
    }
}

/// Waits for a byte, so that it can be moved to the kubelet's cgroup first, then connects and says what the server
/// saw.
fn probe(address: SocketAddr) -> ExitCode {
    let _ = std::io::stdin().read(&mut [0]);
    match Client::connect_here(address) {
        Ok(client) => {
            println!("{}", client.seen_as);
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("{:?}", error.kind());
            ExitCode::FAILURE
        }
    }
}

fn fail(message: &str) -> ExitCode {
    eprintln!("weir-gear: {message}");
    ExitCode::from(2)
}
