//! Namespaces of processes.

use std::io;
use std::os::unix::fs::MetadataExt;

/// Refuses the namespace of this kind (`net`, `uts`) of a process if it is this program's too, the host's: what the spec of
/// a container gives its own namespace is not set there, whatever its images say.
pub fn ensure_not_ours(pid: i32, kind: &str) -> io::Result<()> {
    let of = |process: &str| {
        let meta = std::fs::metadata(format!("/proc/{process}/ns/{kind}"))?;
        io::Result::Ok((meta.dev(), meta.ino()))
    };
    match of("self")? == of(&pid.to_string())? {
        true => Err(io::Error::other(format!(
            "the {kind} namespace of process {pid} is the host's"
        ))),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_of_the_host_is_refused() {
        let own = i32::try_from(std::process::id()).unwrap_or(0);
        assert!(ensure_not_ours(own, "net").is_err());
        assert!(ensure_not_ours(-1, "net").is_err());
    }
}
