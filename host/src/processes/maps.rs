//! Reads `/proc/PID/maps`: the mappings of a process. What they name is hostile: any bytes but a line feed.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::ops::Range;

use crate::files::Host;

/// Mappings of one process that are read at most.
const MAX_LINES: usize = 1 << 20;

/// A line of `/proc/PID/maps`: "start-end perms offset dev inode   name".
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping<'a> {
    /// The address range as the kernel writes it, which is its name in `/proc/PID/map_files`.
    pub range: &'a str,
    pub addresses: Range<u64>,
    pub executable: bool,
    pub inode: u64,
    /// A path, which may have blanks, or a name in brackets; empty for anonymous memory.
    pub name: &'a str,
}

impl<'a> Mapping<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.trim_end().splitn(6, ' ');
        let range = fields.next()?;
        let (start, end) = range.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        Some(Self {
            range,
            addresses: number(start)?..number(end)?,
            executable: fields.next()?.contains('x'),
            inode: fields.nth(2)?.parse().ok()?,
            name: fields.next().unwrap_or_default().trim_start(),
        })
    }

    pub fn bytes(&self) -> u64 {
        self.addresses.end.saturating_sub(self.addresses.start)
    }
}

/// Calls `each` with the mappings of a process, the lowest address first.
pub fn for_each(host: &Host, pid: i32, mut each: impl FnMut(Mapping<'_>)) -> io::Result<()> {
    let file = File::open(host.path(format!("/proc/{pid}/maps")))?;
    let mut reader = BufReader::with_capacity(64 << 10, file);
    let mut line = Vec::new();
    for _ in 0..MAX_LINES {
        line.clear();
        if reader.read_until(b'\n', &mut line)? == 0 {
            break;
        }
        if let Some(mapping) = Mapping::parse(&String::from_utf8_lossy(&line)) {
            each(mapping);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_with_and_without_a_name() {
        let node = "200600000-200800000 rw-s 00000000 00:06 143                /dev/nvidia0\n";
        let node = Mapping::parse(node).unwrap();
        assert_eq!(
            (node.range, node.name),
            ("200600000-200800000", "/dev/nvidia0")
        );
        assert_eq!((node.inode, node.bytes()), (143, 0x20_0000));
        let file = "7f00-8000 r-xp 00001000 08:01 9      /a file (deleted)";
        let file = Mapping::parse(file).unwrap();
        assert!(file.executable && file.name == "/a file (deleted)");
        assert_eq!(file.addresses, 0x7f00..0x8000);
        for anonymous in [
            "1000-2000 ---p 00000000 00:00 0 ",
            "1000-2000 ---p 00000000 00:00 0",
        ] {
            assert_eq!(Mapping::parse(anonymous).unwrap().name, "");
        }
        for wrong in [
            "",
            "x-y rw-p 0 00:00 0 /a",
            "1000 rw-p 0 00:00 0 /a",
            "1000-2000 rw-p",
        ] {
            assert_eq!(Mapping::parse(wrong), None, "{wrong}");
        }
    }
}
