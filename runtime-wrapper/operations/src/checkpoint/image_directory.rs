//! Makes the image directory of a checkpoint, and removes it again if it stays empty.

use std::fs::{self, File};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use cryopod_host::containerd::is_image_directory;

use crate::error::Error;

pub(super) struct ImageDirectory {
    pub path: PathBuf,
    made: bool,
    /// containerd's own directory, open. containerd removes it as soon as its caller is gone, even during the dump.
    containerds: Option<File>,
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
        let open = || File::open(path).map_err(Error::io(path.display().to_string()));
        Ok(Self {
            path: path.to_owned(),
            made,
            containerds: containerds.then(open).transpose()?,
        })
    }

    /// Keeps the directory, also if it is empty.
    pub fn keep(mut self) {
        self.made = false;
        self.containerds = None;
    }
}

impl Drop for ImageDirectory {
    fn drop(&mut self) {
        if self.made {
            // Succeeds only on an empty directory: logs and half-made images belong to the runtime.
            let _ = fs::remove_dir(&self.path);
        }
        let removed = |d: &File| d.metadata().is_ok_and(|m| m.nlink() == 0);
        if self.containerds.as_ref().is_some_and(removed) {
            // runc has made it again, and containerd will not look there.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containerds_directory_is_not_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ctrd-checkpoint42");
        let refused = ImageDirectory::ready(&path).err().unwrap().to_string();
        assert!(refused.contains("containerd has removed it"), "{refused}");
        assert!(!path.exists());
        let again = || {
            fs::remove_dir(&path).unwrap();
            fs::create_dir(&path).unwrap();
            fs::write(path.join("pages-1.img"), "pages").unwrap();
        };
        fs::create_dir(&path).unwrap();
        let ours = ImageDirectory::ready(&path).unwrap();
        fs::write(path.join("core-1.img"), "core").unwrap();
        drop(ours);
        assert!(path.exists(), "containerd removes its own");
        fs::remove_file(path.join("core-1.img")).unwrap();
        let ours = ImageDirectory::ready(&path).unwrap();
        again();
        drop(ours);
        assert!(!path.exists());
        let user = dir.path().join("images");
        drop(ImageDirectory::ready(&user).unwrap());
        assert!(!user.exists());
        ImageDirectory::ready(&user).unwrap().keep();
        assert!(user.exists());
    }
}
