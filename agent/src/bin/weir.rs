//! Entry point of `weir`.

fn main() {}
