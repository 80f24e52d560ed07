//! Reads from ELF files what a CRIU plugin demands and what the installed CRIU supports.
//!
//! CRIU looks at a plugin's descriptor (`CR_PLUGIN_DESC`: two pointers-to-function and a name, then the ABI version and
//! the number of hooks, both 32 bits) and gives up the whole operation if either is above its own. Its own number of
//! hooks follows from the size of its exported `cr_plugin_ctl`: one list head, then one for each hook.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use object::read::{Object, ObjectSegment, ObjectSymbol};
use object::{Architecture, BinaryFormat};

/// No plugin and no CRIU is larger, in bytes.
const MAX_FILE: u64 = 256 << 20;
const DESCRIPTOR: &str = "CR_PLUGIN_DESC";
const CONTROL: &str = "cr_plugin_ctl";
/// Offset of the ABI version in the descriptor; the number of hooks follows.
const VERSION_AT: u64 = 24;
/// Two pointers.
const LIST_HEAD: u64 = 16;

/// Why an ELF file cannot be understood.
#[derive(Debug, thiserror::Error)]
pub enum ElfError {
    #[error("cannot be read: {0}")]
    Read(#[from] io::Error),
    #[error("is not a 64-bit ELF file: {0}")]
    NotElf(String),
    #[error("is built for {found}, and this machine is {here}")]
    Machine { found: String, here: &'static str },
    #[error("has no {DESCRIPTOR}: it is no CRIU plugin")]
    NoDescriptor,
}

/// What a CRIU plugin says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HookDescriptor {
    /// The ABI version: major << 16 | minor << 8 | sublevel; 0x200 is 0.2.0.
    pub version: u32,
    pub max_hooks: u32,
}

/// What the installed CRIU supports, as its ELF file says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CriuElf {
    pub hooks: Option<u32>,
    pub loader: Option<PathBuf>,
    pub symbols: BTreeSet<String>,
    /// The libraries that it is linked with: their symbols are there for a plugin too.
    pub libraries: Vec<String>,
    /// Built with LZ4, for compressed memory pages (CRIU 4.3).
    pub lz4: bool,
}

fn read(path: &Path) -> Result<Vec<u8>, ElfError> {
    let mut bytes = Vec::new();
    let file = File::open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("not a file").into());
    }
    file.take(MAX_FILE + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(io::Error::other(format!("larger than {MAX_FILE} bytes")).into());
    }
    Ok(bytes)
}

fn parse(bytes: &[u8]) -> Result<object::File<'_>, ElfError> {
    let file = object::File::parse(bytes).map_err(|e| ElfError::NotElf(e.to_string()))?;
    if file.format() != BinaryFormat::Elf || !file.is_64() {
        return Err(ElfError::NotElf(format!("{:?}", file.format())));
    }
    let here = match std::env::consts::ARCH {
        "x86_64" => Architecture::X86_64,
        "aarch64" => Architecture::Aarch64,
        _ => file.architecture(),
    };
    if file.architecture() != here {
        return Err(ElfError::Machine {
            found: format!("{:?}", file.architecture()).to_lowercase(),
            here: std::env::consts::ARCH,
        });
    }
    Ok(file)
}

/// Reads the descriptor of a CRIU plugin.
pub fn descriptor(path: &Path) -> Result<HookDescriptor, ElfError> {
    let bytes = read(path)?;
    let file = parse(&bytes)?;
    let symbol = file
        .dynamic_symbols()
        .find(|s| s.is_definition() && s.name() == Ok(DESCRIPTOR))
        .ok_or(ElfError::NoDescriptor)?;
    let at = symbol.address().wrapping_add(VERSION_AT);
    let words = file
        .segments()
        .find_map(|s| s.data_range(at, 8).ok().flatten())
        .and_then(|b| <[u8; 8]>::try_from(b).ok())
        .ok_or(ElfError::NoDescriptor)?;
    let [a, b, c, d, e, f, g, h] = words;
    let word = |bytes: [u8; 4]| match file.is_little_endian() {
        true => u32::from_le_bytes(bytes),
        false => u32::from_be_bytes(bytes),
    };
    Ok(HookDescriptor {
        version: word([a, b, c, d]),
        max_hooks: word([e, f, g, h]),
    })
}

/// Reads CRIU's program. A `criu` that is a script is an error.
pub fn criu(path: &Path) -> Result<CriuElf, ElfError> {
    use object::read::elf::{FileHeader, ProgramHeader};
    let bytes = read(path)?;
    let file = parse(&bytes)?;
    let mut found = CriuElf::default();
    for symbol in file.dynamic_symbols() {
        let Ok(name) = symbol.name() else { continue };
        // From a library or its own: CRIU exports all symbols that it has.
        found.lz4 |= name.starts_with("LZ4_");
        if !symbol.is_definition() {
            continue;
        }
        if name == CONTROL {
            found.hooks = symbol
                .size()
                .checked_sub(LIST_HEAD)
                .filter(|rest| rest % LIST_HEAD == 0)
                .and_then(|rest| u32::try_from(rest / LIST_HEAD).ok());
        }
        found.symbols.insert(name.to_owned());
    }
    let header = object::elf::FileHeader64::<object::Endianness>::parse(&*bytes);
    let interpreter = header.ok().and_then(|header| {
        let endian = header.endian().ok()?;
        let headers = header.program_headers(endian, &*bytes).ok()?;
        headers
            .iter()
            .find_map(|h| h.interpreter(endian, &*bytes).ok().flatten())
    });
    found.loader = interpreter
        .and_then(|name| std::str::from_utf8(name).ok())
        .map(PathBuf::from)
        .filter(|p| p.is_absolute());
    found.libraries = needed(&bytes).unwrap_or_default();
    Ok(found)
}

fn needed(bytes: &[u8]) -> Result<Vec<String>, object::Error> {
    use object::read::elf::{Dyn, FileHeader};
    let header = object::elf::FileHeader64::<object::Endianness>::parse(bytes)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, bytes)?;
    let Some((dynamic, link)) = sections.dynamic(endian, bytes)? else {
        return Ok(Vec::new());
    };
    let strings = sections.strings(endian, bytes, link)?;
    let libraries = dynamic
        .iter()
        .filter(|d| d.tag(endian) == object::elf::DT_NEEDED)
        .filter_map(|d| d.string(endian, strings).ok())
        .filter_map(|name| Some(std::str::from_utf8(name).ok()?.to_owned()));
    Ok(libraries.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::process::Command;

    /// Built by the machine's C compiler, which Rust needs as a linker anyway.
    fn built(dir: &Path, name: &str, source: &str, flags: &[&str]) -> PathBuf {
        let (c, out) = (dir.join("x.c"), dir.join(name));
        std::fs::write(&c, source).unwrap();
        let done = Command::new("cc")
            .args(flags)
            .arg("-o")
            .args([&out, &c])
            .status()
            .unwrap();
        assert!(done.success());
        out
    }

    #[test]
    fn a_plugin_and_a_criu() {
        let dir = tempfile::tempdir().unwrap();
        let source = "int init(int s) { return s; }\nstruct { const char *name; int (*init)(int); void *exit; unsigned version, max_hooks; void *hooks[12]; } CR_PLUGIN_DESC = {\"x\", init, 0, 0x200, 12};\n";
        let plugin = built(dir.path(), "p.so", source, &["-shared", "-fPIC"]);
        let said = descriptor(&plugin).unwrap();
        assert_eq!((said.version, said.max_hooks), (0x200, 12));

        let source =
            "struct { char bytes[16 + 13 * 16]; } cr_plugin_ctl;\nint main(void) { return 0; }\n";
        let program = built(dir.path(), "criu", source, &["-rdynamic"]);
        let said = criu(&program).unwrap();
        assert_eq!(said.hooks, Some(13));
        assert!(said.symbols.contains("main"));
        assert!(said.libraries.iter().any(|l| l.starts_with("libc.so")));
        assert!(said.loader.unwrap().is_file());
        assert!(matches!(descriptor(&program), Err(ElfError::NoDescriptor)));
    }

    #[test]
    fn other_files() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("criu");
        std::fs::write(&script, "#!/bin/sh\nexec /opt/criu \"$@\"\n").unwrap();
        assert!(matches!(criu(&script), Err(ElfError::NotElf(_))));
        assert!(matches!(descriptor(dir.path()), Err(ElfError::Read(_))));
        assert!(matches!(
            descriptor(Path::new("/no/such")),
            Err(ElfError::Read(_))
        ));
    }

    fn plugin() -> Vec<u8> {
        let dir = tempfile::tempdir().unwrap();
        let source = "struct { void *p[3]; unsigned a, b; } CR_PLUGIN_DESC = {{0}, 0x200, 12};\n";
        let flags = ["-shared", "-fPIC", "-nostdlib"];
        std::fs::read(built(dir.path(), "p.so", source, &flags)).unwrap()
    }

    proptest! {
        #[test]
        fn a_damaged_file_is_an_error_or_read(at: prop::sample::Index, cut: prop::sample::Index, value: u8) {
            static GOOD: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
            let mut bytes = GOOD.get_or_init(plugin).clone();
            let at = at.index(bytes.len());
            bytes[at] = value;
            bytes.truncate(bytes.len() - cut.index(bytes.len()) / 4);
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), bytes).unwrap();
            let _ = (descriptor(file.path()), criu(file.path()));
        }
    }
}
