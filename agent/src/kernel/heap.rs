//! Keeps the agent small: what the C library's allocator does by default is for programs with many busy threads.

#[cfg(target_env = "gnu")]
use nix::libc;

/// One arena for all threads: every visit to a namespace is a thread of its own, and with an arena each the agent
/// would grow by tens of megabytes. To be called before there are threads.
pub fn one_arena() {
    #[cfg(target_env = "gnu")]
    // SAFETY: a plain call with two integers.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Gives back what is free, after the kernel's type information has been read: tens of megabytes that are not needed
/// again.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: a plain call.
    unsafe {
        libc::malloc_trim(0);
    }
}
