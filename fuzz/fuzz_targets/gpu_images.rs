//! Images that CRIU's plugins left in a checkpoint, and CRIU's own lists of mounts. The first byte says which.
#![no_main]

use cryopod_amd::image::{KfdImage, RenderImage};
use cryopod_archive::criu::mounts;
use cryopod_cuda::messages::image::NvidiaImage;
use cryopod_operations::images::mountpoints;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let [which, rest @ ..] = data else { return };
    match which % 4 {
        0 => {
            if let Ok(image) = NvidiaImage::parse(rest) {
                assert!(image.validate().is_ok());
            }
        }
        1 => drop(KfdImage::parse("amdgpu-kfd-1.img", rest)),
        2 => drop(RenderImage::parse("amdgpu-renderD-128.img", rest)),
        _ => {
            let Ok(mounts) = mounts::read("mountpoints-1.img", rest) else {
                return;
            };
            for mount in &mounts {
                mountpoints::covering(&mounts, &mount.path);
            }
        }
    }
});
