//! Embeds the compiled eBPF objects, where they have been built.
//!
//! Without them the crate still builds, lints and runs its unit tests: a checkout needs no BPF toolchain for those.

use std::{env, fs, path::PathBuf};

fn main() {
    let dir = env::var_os("WEIR_BPF_DIR").map_or_else(
        || PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("set by cargo")).join("../target/bpf"),
        PathBuf::from,
    );
    println!("cargo::rerun-if-env-changed=WEIR_BPF_DIR");
    let mut code = String::new();
    for (constant, name) in [("POD", "weir-pod.bpf.o"), ("NODE", "weir-node.bpf.o")] {
        let path = dir.join(name);
        println!("cargo::rerun-if-changed={}", path.display());
        let value = if path.is_file() {
            let path = path.canonicalize().expect("a file that exists has a path");
            format!("Some(aya::include_bytes_aligned!({path:?}))")
        } else {
            "None".to_owned()
        };
        code += &format!("const {constant}: Option<&[u8]> = {value};\n");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("set by cargo")).join("objects.rs");
    fs::write(out, code).expect("OUT_DIR is writable");
}
