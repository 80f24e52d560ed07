//! What to do about an error of CRIU's restore that no check foresees: CRIU names a symptom alone.

/// A part of CRIU's message, and what to do.
const REMEDIES: [(&str, &str); 9] = [
    (
        " has bad size ",
        "that file is not the checkpoint's: use the same image (by its digest, not a tag that has moved) and the same volumes",
    ),
    (
        "has bad build-ID",
        "that file is not the checkpoint's: use the same image (by its digest, not a tag that has moved) and the same volumes",
    ),
    (
        "Address already in use",
        "another process has that address or port (`ss -lnp` shows it): end it",
    ),
    (
        "Cannot assign requested address",
        "the container had another address: give it the same, or restore with tcp-close",
    ),
    (
        " killed by signal 9",
        "something killed the process: often the memory limit, of the container or of a cgroup above (`dmesg` says so)",
    ),
    (
        "No space left on device",
        "a tmpfs or disk of the new container is smaller than the checkpoint's, or is full",
    ),
    (
        "Read-only file system",
        "a file that a process writes is read-only now: mount it as at the checkpoint",
    ),
    (
        "Resource temporarily unavailable",
        "raise the limit of processes: of the container, of its user (nproc), of a cgroup above",
    ),
    (
        "Cannot allocate memory",
        "free memory, or raise the container's limit, vm.max_map_count or vm.overcommit_memory",
    ),
];

/// Returns what to do about this failure, as the end of its sentence.
pub fn remedy(why: &str) -> Option<&'static str> {
    let known = REMEDIES.iter().find(|(error, _)| why.contains(error));
    known.map(|(_, remedy)| *remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_as_criu_writes_them() {
        for (error, word) in [
            (
                "CRIU: Error (criu/files-reg.c:2175): File bin/busybox has bad size 2 (expect 1) (log: /x)",
                "same image",
            ),
            (
                "CRIU: Error (criu/sk-inet.c:1059): inet: Can't bind inet socket (id 8): Address already in use",
                "ss -lnp",
            ),
            (
                "CRIU: Error (criu/cr-restore.c:1262): 1322 killed by signal 9: Killed",
                "memory limit",
            ),
        ] {
            assert!(
                remedy(error).is_some_and(|remedy| remedy.contains(word)),
                "{error}"
            );
        }
        assert_eq!(remedy("CRIU: Error (criu/x.c:1): strange"), None);
    }
}
