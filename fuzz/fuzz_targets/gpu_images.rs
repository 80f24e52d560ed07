//! Images that CRIU's plugins left in a checkpoint, and CRIU's own lists of mounts. The first byte says which.
#![no_main]

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use cryopod_amd::image::{KfdImage, RenderImage};
use cryopod_cuda::image::NvidiaImage;
use cryopod_operations::images::mountpoints;
use libfuzzer_sys::fuzz_target;

static DIR: LazyLock<PathBuf> = LazyLock::new(|| {
    let dir = cryopod_fuzz::scratch("gpu-images");
    let _ = fs::create_dir_all(&dir);
    dir
});

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
            if fs::write(DIR.join("mountpoints-1.img"), rest).is_err() {
                return;
            }
            let Ok(mounts) = mountpoints::read(&DIR) else {
                return;
            };
            for mount in &mounts {
                mountpoints::covering(&mounts, &mount.path);
            }
        }
    }
});
