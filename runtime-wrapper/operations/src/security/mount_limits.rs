//! Lists the mount options that take something away: `ro`, `nosuid`, `nodev`, `noexec`, `nosymfollow`.

/// An option of a mount, with its flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MountLimit {
    pub option: &'static str,
    /// The option that takes it back.
    undone_by: &'static str,
    /// `MOUNT_ATTR_*`.
    pub attribute: u64,
    /// `MS_*`, as CRIU's images have it.
    pub flag: u32,
    /// For all mounts below as well: `rro` and the like.
    pub recursive: bool,
}

const LIMITS: [MountLimit; 5] = [
    limit("ro", "rw", libc::MOUNT_ATTR_RDONLY, 1),
    limit("nosuid", "suid", libc::MOUNT_ATTR_NOSUID, 2),
    limit("nodev", "dev", libc::MOUNT_ATTR_NODEV, 4),
    limit("noexec", "exec", libc::MOUNT_ATTR_NOEXEC, 8),
    limit(
        "nosymfollow",
        "symfollow",
        libc::MOUNT_ATTR_NOSYMFOLLOW,
        256,
    ),
];

const fn limit(
    option: &'static str,
    undone_by: &'static str,
    attribute: u64,
    flag: u32,
) -> MountLimit {
    MountLimit {
        option,
        undone_by,
        attribute,
        flag,
        recursive: false,
    }
}

/// Returns the limits that these `MS_*` flags set.
pub fn of_flags(flags: u32) -> impl Iterator<Item = MountLimit> {
    LIMITS.into_iter().filter(move |l| flags & l.flag != 0)
}

/// Returns the limits that these options of a spec's mount set; the last of two that contradict each other counts.
pub fn limits(options: &[String]) -> impl Iterator<Item = MountLimit> {
    LIMITS.iter().filter_map(move |limit| {
        let mut last = None;
        for option in options {
            let (option, recursive) = match option.strip_prefix('r') {
                Some(rest) if rest == limit.option || rest == limit.undone_by => (rest, true),
                _ => (option.as_str(), false),
            };
            if option == limit.option {
                last = Some(recursive);
            } else if option == limit.undone_by {
                last = None;
            }
        }
        last.map(|recursive| MountLimit {
            recursive,
            ..*limit
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_option_counts() {
        for (options, want) in [
            (&["rbind", "rw"][..], &[][..]),
            (&["ro", "nosuid"], &[("ro", false), ("nosuid", false)]),
            (&["rro"], &[("ro", true)]),
            (&["ro", "rw"], &[]),
            (&["rw", "ro"], &[("ro", false)]),
            (&["rnoexec", "rexec", "noexec"], &[("noexec", false)]),
        ] {
            let options: Vec<String> = options.iter().map(|o| (*o).to_owned()).collect();
            let found: Vec<_> = limits(&options).map(|l| (l.option, l.recursive)).collect();
            assert_eq!(found, want, "{options:?}");
        }
    }
}
