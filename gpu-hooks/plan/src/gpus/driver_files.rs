//! Knows where the files of a GPU driver lie on a host.

use std::path::Path;

use cryopod_host::mountinfo::below;

/// Places of drivers and their sockets: files, and directories with all below them. A checkpoint may come from a
/// stranger: without the administrator's permission it may have only these mounted.
const DRIVER_PLACES: [&str; 11] = [
    "/proc/driver/nvidia",
    "/dev/dri",
    "/usr/share/nvidia",
    "/usr/share/vulkan",
    "/usr/share/glvnd",
    "/usr/share/egl",
    "/etc/vulkan",
    "/etc/OpenCL",
    "/opt/nvidia",
    "/usr/local/nvidia",
    "/dev/kfd",
];

/// Directories of libraries and firmware: files in them, and directories below one whose name begins with `nvidia`.
const LIBRARY_PLACES: [&str; 5] = ["/usr/lib", "/usr/lib64", "/usr/lib32", "/lib", "/lib64"];

/// Where NVIDIA's driver container shows its root, a whole tree of a system: only the places above within it count.
const DRIVER_ROOT: &str = "/run/nvidia/driver";

/// Prefixes of names: of files, or of directories with all below them.
const DRIVER_NAMES: [&str; 3] = ["/dev/nvidia", "/usr/bin/nvidia-", "/run/nvidia-"];

/// Returns true for a file or directory of a GPU driver. `path` is one of the host without symbolic links.
pub fn is_driver_place(path: &Path, directory: bool) -> bool {
    if let Some(within) = below(path, Path::new(DRIVER_ROOT)) {
        let within = Path::new("/").join(within);
        return within != Path::new("/") && is_driver_place(&within, directory);
    }
    let text = path.to_string_lossy();
    let library = LIBRARY_PLACES
        .iter()
        .find_map(|place| below(path, Path::new(place)));
    let of_nvidia = |rest: &Path| {
        rest.components()
            .any(|c| c.as_os_str().to_string_lossy().starts_with("nvidia"))
    };
    DRIVER_PLACES
        .iter()
        .any(|place| below(path, Path::new(place)).is_some())
        || DRIVER_NAMES.iter().any(|start| text.starts_with(start))
        || text.starts_with("/run/nvidia/") && !directory
        || library.is_some_and(|rest| !directory || of_nvidia(rest))
}
