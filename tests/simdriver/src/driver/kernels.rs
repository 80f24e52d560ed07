//! The kernels of `gpu-hooks/cuda/src/copy/digest/blake3.cu`, by which the driver agent makes digests. Real GPUs run the code
//! itself (`make gpu-test`).

use std::ffi::{CStr, c_char, c_uint, c_void};

use blake3::hazmat::{HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root};

use super::exports::{cuMemcpyDtoH_v2, cuMemcpyHtoD_v2, put};
use super::process::api;
use super::steps;
use crate::abi::*;
use crate::wire::Step;

const KERNELS: [&CStr; 2] = [c"blake3_blocks", c"blake3_parents"];
type Node = [u8; 32];

fn read<T: Copy + Default>(from: CuDevicePtr, count: usize) -> Result<Vec<T>, CuResult> {
    let mut all = vec![T::default(); count];
    match cuMemcpyDtoH_v2(all.as_mut_ptr().cast(), from, size_of_val(&all[..])) {
        CUDA_SUCCESS => Ok(all),
        code => Err(code),
    }
}

fn write(to: CuDevicePtr, node: &Node) -> Result<(), CuResult> {
    match cuMemcpyHtoD_v2(to, node.as_ptr().cast(), size_of::<Node>()) {
        CUDA_SUCCESS => Ok(()),
        code => Err(code),
    }
}

/// Address; bytes and first leaf; whether it is the root.
fn hash_blocks(blocks: CuDevicePtr, count: usize, out: CuDevicePtr) -> Result<(), CuResult> {
    for (i, [address, place, root]) in read::<[u64; 3]>(blocks, count)?.into_iter().enumerate() {
        let bytes = read::<u8>(
            address,
            usize::try_from(place & 0xffff_ffff).unwrap_or_default(),
        )?;
        let mut hasher = blake3::Hasher::new();
        hasher.set_input_offset((place >> 32) * 1024);
        hasher.update(&bytes);
        let node = match root & 1 {
            1 => *hasher.finalize().as_bytes(),
            _ => hasher.finalize_non_root(),
        };
        write(out + 32 * i as u64, &node)?;
    }
    Ok(())
}

/// First node and their number.
fn hash_parents(ranges: CuDevicePtr, count: usize, nodes: CuDevicePtr) -> Result<(), CuResult> {
    for [first, count] in read::<[u32; 2]>(ranges, count)? {
        let at = nodes + 32 * u64::from(first);
        let mut level: Vec<Node> = read(at, count as usize)?;
        while level.len() > 1 {
            let last = level.len() == 2;
            let join = |pair: &[Node]| match pair {
                [left, right] if last => *merge_subtrees_root(left, right, Mode::Hash).as_bytes(),
                [left, right] => merge_subtrees_non_root(left, right, Mode::Hash),
                rest => rest.first().copied().unwrap_or_default(),
            };
            level = level.chunks(2).map(join).collect();
        }
        level.first().map_or(Ok(()), |node| write(at, node))?;
    }
    Ok(())
}

exports! {
    fn cuModuleLoadData(module: *mut *mut c_void, _image: *const c_void) =
        put(module, Ok(std::ptr::without_provenance_mut(1)));
    fn cuModuleGetFunction(function: *mut *mut c_void, _module: *mut c_void, name: *const c_char) = {
        // SAFETY: the program promised a C string.
        let kernel = |name| KERNELS.iter().position(|kernel| *kernel == unsafe { CStr::from_ptr(name) });
        let number = (!name.is_null()).then_some(name).and_then(kernel);
        let number = number.map(|n| std::ptr::without_provenance_mut(n + 1));
        put(function, number.ok_or(CUDA_ERROR_INVALID_VALUE))
    };
}

#[unsafe(no_mangle)]
extern "C" fn cuLaunchKernel(
    function: *mut c_void,
    groups: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _stream: *mut c_void,
    arguments: *const *const c_void,
    _extra: *const *const c_void,
) -> CuResult {
    // SAFETY: the program promised an argument of this type in this place.
    let number = |i: usize| unsafe { (*arguments.add(i)).cast::<CuDevicePtr>().read_unaligned() };
    let begun = api(|inner| steps::begin(inner, Step::Launch, None, 0).map_err(|stop| stop.code));
    let done = begun.and_then(|_| match function.addr() {
        1 => hash_blocks(number(0), groups as usize, number(1)),
        2 => {
            // SAFETY: as above.
            let all = unsafe { (*arguments.add(2)).cast::<u32>().read_unaligned() };
            hash_parents(number(0), all as usize, number(1))
        }
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    });
    done.err().unwrap_or(CUDA_SUCCESS)
}
