//! The driver's calls for physical memory and for addresses.

use super::{DEVICE, OUT_OF_MEMORY, PINNED, POSIX_DESCRIPTOR};
use crate::contexts;
use crate::driver::{Symbol, call};
use crate::map::{Access, Location, Properties};
use std::ffi::{CStr, c_int};

const READ_WRITE: u32 = 3;
const RDMA_SUPPORTED: usize = 110;

fn checked(code: c_int) -> Result<(), c_int> {
    match code {
        0 => Ok(()),
        code => Err(code),
    }
}

pub(super) fn driver_call<const N: usize>(symbol: Symbol, a: [usize; N]) -> Result<(), c_int> {
    // SAFETY: each caller here passes what the function takes: numbers, and pointers to live locals.
    checked(unsafe { call(symbol, a) })
}

pub(super) fn other_call<const N: usize>(name: &CStr, a: [usize; N]) -> Result<(), c_int> {
    checked(contexts::other_call(name, a))
}

pub(super) fn device_memory(device: i32, rdma: bool) -> Properties {
    Properties {
        kind: PINNED,
        handle_types: POSIX_DESCRIPTOR,
        location: Location {
            kind: DEVICE,
            id: device,
        },
        win32: 0,
        compression: 0,
        rdma: rdma.into(),
        usage: 0,
        reserved: [0; 4],
    }
}

pub(super) fn access_for(device: i32) -> Access {
    Access {
        location: Location {
            kind: DEVICE,
            id: device,
        },
        flags: READ_WRITE,
    }
}

pub(super) fn create_physical(bytes: u64, properties: &Properties) -> Result<u64, c_int> {
    let mut handle = 0u64;
    let mut properties = *properties;
    // So that it can be given to the driver agent.
    properties.handle_types = POSIX_DESCRIPTOR;
    let from = &raw const properties as usize;
    let arguments = [&raw mut handle as usize, bytes as usize, from, 0];
    driver_call(Symbol::cuMemCreate, arguments).map(|()| handle)
}

/// The same, and without RDMA if that is why it fails: another host's GPU may not have it.
pub(super) fn create_anywhere(bytes: u64, properties: &mut Properties) -> Result<u64, c_int> {
    let made = create_physical(bytes, properties);
    if made.is_ok() || made == Err(OUT_OF_MEMORY) || properties.rdma == 0 {
        return made;
    }
    let without = Properties {
        rdma: 0,
        ..*properties
    };
    let made = create_physical(bytes, &without)?;
    *properties = without;
    Ok(made)
}

pub(super) fn supports_rdma(device: i32) -> bool {
    let mut value = 0i32;
    let arguments = [&raw mut value as usize, RDMA_SUPPORTED, device as usize];
    other_call(c"cuDeviceGetAttribute", arguments).is_ok() && value == 1
}

pub(super) fn release_physical(handle: u64) -> Result<(), c_int> {
    driver_call(Symbol::cuMemRelease, [handle as usize])
}

pub(super) fn map_physical(
    address: u64,
    bytes: u64,
    offset: u64,
    handle: u64,
) -> Result<(), c_int> {
    let numbers = [address, bytes, offset, handle, 0];
    driver_call(Symbol::cuMemMap, numbers.map(|number| number as usize))
}

pub(super) fn unmap_physical(address: u64, bytes: u64) -> Result<(), c_int> {
    driver_call(Symbol::cuMemUnmap, [address as usize, bytes as usize])
}

pub(super) fn set_access(address: u64, bytes: u64, access: &[Access]) -> Result<(), c_int> {
    let range = [address as usize, bytes as usize];
    let arguments = [range[0], range[1], access.as_ptr() as usize, access.len()];
    driver_call(Symbol::cuMemSetAccess, arguments)
}

pub(super) fn reserve(bytes: usize) -> Result<u64, c_int> {
    let mut address = 0u64;
    let arguments = [&raw mut address as usize, bytes, 0, 0, 0];
    other_call(c"cuMemAddressReserve", arguments).map(|()| address)
}

pub(super) fn unreserve(address: u64, bytes: usize) {
    let _ = other_call(c"cuMemAddressFree", [address as usize, bytes]);
}
