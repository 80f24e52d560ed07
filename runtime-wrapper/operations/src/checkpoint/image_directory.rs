//! Makes the image directory of a checkpoint, and removes it again if it stays empty.

use std::fs::{self, File};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use cryopod_host::containerd::is_image_directory;

use crate::error::Error;
use crate::rootfs;

/// A file in containerd's own directory while cryopod works there. containerd removes all that it finds as soon as its
/// caller is gone, even during the dump, and leaves the directory if something new comes meanwhile.
const WAITED_FOR: &str = ".cryopod-waited-for";

pub(super) struct ImageDirectory {
    pub path: PathBuf,
    made: bool,
    /// [`WAITED_FOR`], open.
    waited_for: Option<File>,
}

impl ImageDirectory {
    /// Makes the directory if it is missing.
    pub fn ready(path: &Path) -> Result<Self, Error> {
        if path.exists() && !path.is_dir() {
            return Err(Error::untouched(format!(
                "{}: the image path is not a directory; name another one",
                path.display()
            )));
        }
        let containerds = is_image_directory(path);
        let made = !path.exists();
        if made && containerds {
            return Err(Error::untouched(format!(
                "{}: containerd has removed it: whoever asked for this checkpoint no longer waits for it; try again",
                path.display()
            )));
        }
        if made {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(path)
                .map_err(Error::at(path, "the image directory cannot be made"))?;
        }
        // Of an earlier checkpoint into the same directory (podman's --keep): a restore would put its files over newer ones.
        for name in [rootfs::FILE, rootfs::SHM_FILE] {
            let old = path.join(name);
            // A read-only file system refuses to remove what is not there.
            if old.symlink_metadata().is_ok() {
                fs::remove_file(&old).map_err(Error::io(old.display().to_string()))?;
            }
        }
        let waited_for = path.join(WAITED_FOR);
        let create =
            || File::create(&waited_for).map_err(Error::io(waited_for.display().to_string()));
        Ok(Self {
            path: path.to_owned(),
            made,
            waited_for: containerds.then(create).transpose()?,
        })
    }

    /// Keeps the directory, also if it is empty.
    pub fn keep(mut self) {
        self.made = false;
    }
}

impl Drop for ImageDirectory {
    fn drop(&mut self) {
        if self.made {
            // Succeeds only on an empty directory: logs and half-made images belong to the runtime.
            let _ = fs::remove_dir(&self.path);
        }
        let Some(waited_for) = &self.waited_for else {
            return;
        };
        // Whatever has come since is not removed by containerd.
        let _ = match waited_for.metadata().is_ok_and(|m| m.nlink() == 0) {
            true => fs::remove_dir_all(&self.path),
            false => fs::remove_file(self.path.join(WAITED_FOR)),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_an_earlier_checkpoint_go() {
        let dir = tempfile::tempdir().unwrap();
        let old = [rootfs::FILE, rootfs::SHM_FILE].map(|name| dir.path().join(name));
        for path in &old {
            fs::write(path, "of then").unwrap();
        }
        ImageDirectory::ready(dir.path()).unwrap().keep();
        assert!(old.iter().all(|path| !path.exists()));
    }

    #[test]
    fn containerds_directory_is_not_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ctrd-checkpoint42");
        let refused = ImageDirectory::ready(&path).err().unwrap().to_string();
        assert!(refused.contains("containerd has removed it"), "{refused}");
        assert!(!path.exists());
        fs::create_dir(&path).unwrap();
        for keep in [false, true] {
            let ours = ImageDirectory::ready(&path).unwrap();
            fs::write(path.join("core-1.img"), "core").unwrap();
            if keep {
                ours.keep();
            } else {
                drop(ours);
            }
            let names = fs::read_dir(&path).unwrap().map(|e| e.unwrap().file_name());
            assert_eq!(
                names.collect::<Vec<_>>(),
                ["core-1.img"],
                "containerd removes its own"
            );
        }
        for runc_has_made_it_again in [false, true] {
            fs::create_dir_all(&path).unwrap();
            let ours = ImageDirectory::ready(&path).unwrap();
            for entry in fs::read_dir(&path).unwrap() {
                fs::remove_file(entry.unwrap().path()).unwrap();
            }
            if runc_has_made_it_again {
                fs::remove_dir(&path).unwrap();
                fs::create_dir(&path).unwrap();
            }
            fs::write(path.join("pages-1.img"), "pages").unwrap();
            drop(ours);
            assert!(!path.exists());
        }
        let user = dir.path().join("images");
        drop(ImageDirectory::ready(&user).unwrap());
        assert!(!user.exists());
        ImageDirectory::ready(&user).unwrap().keep();
        assert!(user.exists());
    }
}
