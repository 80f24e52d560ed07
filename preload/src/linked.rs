//! Functions that programs and libraries of this process are linked with. The dynamic linker binds them without asking
//! this library, so one that it does not know is found here: by the relocations of all loaded files.

use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_int, c_void};

// elf.h
const PT_DYNAMIC: u32 = 2;
const DT_PLTRELSZ: u64 = 2;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_RELA: u64 = 7;
const DT_RELASZ: u64 = 8;
const DT_JMPREL: u64 = 23;
const DT_RELACOUNT: u64 = 0x6fff_fff9;
const LAST_OF_INTEREST: usize = 24;

#[repr(C)]
struct Relocation {
    offset: u64,
    info: u64,
    addend: i64,
}

#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: u64,
    size: u64,
}

/// The names of functions that loaded files need from others, as `is_wanted` chooses them.
pub fn names(is_wanted: fn(&[u8]) -> bool) -> BTreeSet<String> {
    let mut found = Found {
        is_wanted,
        names: BTreeSet::new(),
    };
    // SAFETY: the function gets the pointer to `found` alone, and only during the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut found).cast()) };
    found.names
}

struct Found {
    is_wanted: fn(&[u8]) -> bool,
    names: BTreeSet<String>,
}

unsafe extern "C" fn visit(
    info: *mut libc::dl_phdr_info,
    _size: libc::size_t,
    found: *mut c_void,
) -> c_int {
    // SAFETY: the linker's description of a loaded file, and what `names` passes.
    unsafe {
        let (info, found) = (&*info, &mut *found.cast::<Found>());
        let headers = std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into());
        for header in headers.iter().filter(|header| header.p_type == PT_DYNAMIC) {
            let dynamic = (info.dlpi_addr + header.p_vaddr) as *const [u64; 2];
            look(info.dlpi_addr, dynamic, found);
        }
    }
    0
}

/// # Safety
/// The dynamic section of a file that the linker has loaded at `base`, ended by a zero tag.
unsafe fn look(base: u64, mut dynamic: *const [u64; 2], found: &mut Found) {
    let (mut tags, mut relative) = ([0u64; LAST_OF_INTEREST], 0u64);
    // SAFETY: the caller vouches for it.
    unsafe {
        while (*dynamic)[0] != 0 {
            let [tag, value] = *dynamic;
            match usize::try_from(tag) {
                Ok(at) if at < LAST_OF_INTEREST => tags[at] = value,
                _ if tag == DT_RELACOUNT => relative = value,
                _ => {}
            }
            dynamic = dynamic.add(1);
        }
    }
    // The linker has made them addresses, but for the kernel's own file.
    let address = |tag: u64| tags[tag as usize];
    let tables = [DT_SYMTAB, DT_STRTAB].map(address);
    if tables.iter().any(|table| *table < base || *table == 0) {
        return;
    }
    let [symbols, strings] = tables;
    for (table, bytes, skipped) in [
        (address(DT_JMPREL), address(DT_PLTRELSZ), 0),
        // The first ones have no symbol; large libraries have a million.
        (address(DT_RELA), address(DT_RELASZ), relative),
    ] {
        let count = bytes / size_of::<Relocation>() as u64;
        if table < base || table == 0 {
            continue;
        }
        for at in skipped..count {
            // SAFETY: tables of a loaded file, which the linker itself has read.
            unsafe {
                let relocation = &*(table as *const Relocation).add(at as usize);
                let symbol = (relocation.info >> 32) as usize;
                let symbol = &*(symbols as *const Symbol).add(symbol);
                if symbol.section != 0 {
                    continue;
                }
                let name = CStr::from_ptr((strings as *const c_char).add(symbol.name as usize));
                if (found.is_wanted)(name.to_bytes()) {
                    found.names.insert(name.to_string_lossy().into_owned());
                }
            }
        }
    }
}
