//! Embeds the compiled eBPF objects, where they have been built.
//!
//! Without them the crate still builds, lints and runs its unit tests: a checkout needs no BPF toolchain for those.

use std::{env, fs, path::PathBuf};

fn main() {
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("set by cargo"));
    let target = env::var_os("CARGO_TARGET_DIR").map_or_else(|| manifest.join("../target"), PathBuf::from);
    let dir = target.join("bpf");
    println!("cargo::rerun-if-env-changed=CARGO_TARGET_DIR");
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
