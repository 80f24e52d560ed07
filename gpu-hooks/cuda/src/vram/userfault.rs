//! Holds back a process that reads memory before it is there, with userfaultfd(2).
//!
//! At a restore the driver may begin while the VRAM files are still being read: it copies the memory to the GPU from the
//! bottom to the top. The mapping in its process is registered with a userfaultfd. A thread that touches a page of it
//! sleeps, also where the page has been allocated already (the files' reader writes through another mapping). What has
//! been read is unregistered, which wakes the threads that wait for it. Nobody has to read the descriptor's events.
//!
//! As long as the descriptor is open, the rest stays closed. It must not be closed while the process may run on.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// The device that gives out userfaultfds (Linux 6.1).
pub const DEVICE: &str = "/dev/userfaultfd";

// linux/userfaultfd.h
const API: u64 = 0xaa;
const FEATURES: u64 = 1 << 5 | 1 << 10; // MISSING_SHMEM, MINOR_SHMEM
const MODES: u64 = 1 << 0 | 1 << 2; // MISSING, MINOR
const IOC_API: libc::c_ulong = 0xc018_aa3f;
const IOC_REGISTER: libc::c_ulong = 0xc020_aa00;
const IOC_UNREGISTER: libc::c_ulong = 0x8010_aa01;

const PAGE: u64 = 4096;

/// A mapping of a process, of which a lower part can be touched.
#[derive(Debug)]
pub struct Userfault {
    fd: OwnedFd,
    address: u64,
    bytes: u64,
    /// Bytes from the start that can be touched.
    open: u64,
}

fn ioctl<const N: usize>(
    fd: &OwnedFd,
    request: libc::c_ulong,
    argument: &mut [u64; N],
) -> io::Result<()> {
    // SAFETY: each request reads and writes a structure of so many 64-bit numbers, which lives during the call.
    match unsafe { libc::ioctl(fd.as_raw_fd(), request, argument.as_mut_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Opens [`DEVICE`].
pub fn device() -> io::Result<File> {
    File::options().read(true).write(true).open(DEVICE)
}

impl Userfault {
    /// Closes a shared mapping of whole pages; `fd` is a new userfaultfd of its process.
    ///
    /// # Errors
    /// The kernel's. Nothing is closed then, or no longer.
    pub fn close_all(fd: OwnedFd, address: u64, bytes: u64) -> io::Result<Self> {
        ioctl(&fd, IOC_API, &mut [API, FEATURES, 0])?;
        ioctl(&fd, IOC_REGISTER, &mut [address, bytes, MODES, 0])?;
        Ok(Self {
            fd,
            address,
            bytes,
            open: 0,
        })
    }

    /// Lets the process touch so many bytes from the start, and wakes what waits for them.
    pub fn open_to(&mut self, bytes: u64) -> io::Result<()> {
        let to = match bytes >= self.bytes {
            true => self.bytes,
            false => bytes / PAGE * PAGE,
        };
        if to > self.open {
            let range = &mut [self.address + self.open, to - self.open];
            ioctl(&self.fd, IOC_UNREGISTER, range)?;
            self.open = to;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory::{Mapped, new_file};
    use super::*;
    use std::os::fd::FromRawFd;
    use std::sync::mpsc;
    use std::time::Duration;

    /// A reader of memory waits for each part until it is opened, although another mapping has written there.
    #[test]
    fn what_has_not_been_opened_is_waited_for() {
        let Ok(device) = device() else {
            return eprintln!("skipped: {DEVICE} cannot be opened");
        };
        // SAFETY: a number; a new descriptor or -1.
        let fd = unsafe { libc::ioctl(device.as_raw_fd(), 0xaa00, libc::O_CLOEXEC) };
        assert!(fd >= 0);
        // SAFETY: a descriptor that was just made and belongs to nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let bytes = 8 << 20;
        let file = new_file(bytes).unwrap();
        let mut source = Mapped::new(&file, bytes, true).unwrap();
        let reader = Mapped::new(&file, bytes, false).unwrap();
        let address = reader.bytes().as_ptr().expose_provenance() as u64;
        let mut userfault = Userfault::close_all(fd, address, bytes).unwrap();

        let (sender, seen) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            for part in reader.bytes().chunks(2 << 20) {
                sender.send(part[0]).unwrap();
            }
        });
        let waits = || seen.recv_timeout(Duration::from_millis(200)).is_err();
        assert!(waits());
        source.bytes_mut().unwrap().fill(7);
        assert!(waits(), "a page was read that only the other mapping has");
        userfault.open_to((2 << 20) + 5).unwrap();
        assert_eq!(seen.recv_timeout(Duration::from_secs(120)), Ok(7));
        assert!(waits());
        userfault.open_to(1).unwrap();
        userfault.open_to(u64::MAX).unwrap();
        assert_eq!(seen.iter().collect::<Vec<_>>(), [7, 7, 7]);
        thread.join().unwrap();
    }
}
