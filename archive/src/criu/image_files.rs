//! Knows every file that CRIU 4 puts into an image directory, and takes apart those that are made of messages.
//!
//! A restore shows CRIU only files that are known here. Images of CRIU 3 that version 4 still reads (`reg-files.img` and
//! the like) are not: CRIU 4 writes none of them.

use std::io;

use super::message::Message;
use super::schema::MessageType;

/// Since CRIU 1.5 every image but the inventory starts with one of these, followed by its own magic.
const COMMON_MAGIC: u32 = 0x5456_4319;
const SERVICE_MAGIC: u32 = 0x5510_5940;
/// Bytes of one message. CRIU's largest, a process with all of its timers and signals, has about 10 kB.
const MAX_MESSAGE_BYTES: usize = 16 << 20;
/// Messages of one image. Checkpoints of the largest hosts have fewer.
const MAX_MESSAGES: usize = 4_000_000;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    #[error("{file}: not there; this is no complete checkpoint of CRIU")]
    Missing { file: String },
    #[error("{file}: holds nothing; the checkpoint is damaged")]
    Empty { file: String },
    #[error(
        "{file}: starts with {found:#010x}, an image of that name with {expected:#010x}; the checkpoint is damaged"
    )]
    Magic {
        file: String,
        found: u32,
        expected: u32,
    },
    #[error("{file}: ends in the middle of message {message}; the checkpoint is damaged")]
    Truncated {
        file: String,
        /// The message's number, from 0.
        message: usize,
    },
    #[error("{file}: message {message}: {reason}; the checkpoint is damaged")]
    Message {
        file: String,
        message: usize,
        /// The field, and what is wrong with it.
        reason: String,
    },
    #[error(
        "{file}: {what}, more than a checkpoint has; the file is damaged or was made to do harm"
    )]
    TooMuch { file: String, what: String },
}

impl ImageError {
    pub(super) fn missing(file: &str) -> Self {
        Self::Missing { file: file.into() }
    }
}

impl From<ImageError> for io::Error {
    fn from(e: ImageError) -> Self {
        Self::new(io::ErrorKind::InvalidData, e)
    }
}

/// What a file of an image directory holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageContent {
    /// Messages of one type.
    Messages(&'static str),
    /// One message of the first type, then messages of the second.
    HeadAndMessages(&'static str, &'static str),
    /// Messages of one type, each followed by data, whose length it determines.
    WithData(&'static str),
    /// Data alone: memory pages, archives of a tmpfs, dumps of other programs.
    Data,
    /// What no container's checkpoint has: each would reach past the container.
    Refused(&'static str),
}

/// Returns what the file with this name holds, and its magic number (0: none). `None`: CRIU reads no such file.
pub fn content_of(name: &str) -> Option<(ImageContent, u32)> {
    use ImageContent::{Data, HeadAndMessages, Messages, Refused, WithData};
    let stem = name.strip_suffix(".img")?;
    let whole = |content, magic| Some((content, magic));
    match stem {
        "inventory" => return whole(Messages("inventory_entry"), 0x5831_3116),
        "pstree" => return whole(Messages("pstree_entry"), 0x5027_3030),
        "files" => return whole(Messages("file_entry"), 0x5630_3138),
        "seccomp" => return whole(Messages("seccomp_entry"), 0x6441_3049),
        "cgroup" => return whole(Messages("cgroup_entry"), 0x5938_3330),
        "tty-info" => return whole(Messages("tty_info_entry"), 0x5945_3036),
        "tty-data" => return whole(Messages("tty_data_entry"), 0x5941_3026),
        "filelocks" => return whole(Messages("file_lock_entry"), 0x5432_3616),
        "remap-fpath" => return whole(Messages("remap_file_path_entry"), 0x5913_3954),
        "memfd" => return whole(Messages("memfd_inode_entry"), 0x4845_3499),
        "cpuinfo" => return whole(Messages("cpuinfo_entry"), 0x6140_4013),
        "pipes-data" => return whole(WithData("pipe_data_entry"), 0x5645_3709),
        "fifo-data" => return whole(WithData("pipe_data_entry"), 0x5933_3054),
        "sk-queues" => return whole(WithData("sk_packet_entry"), 0x5626_4026),
        "apparmor" => return whole(Refused("AppArmor policy, which would be the host's"), 0),
        "binfmt-misc" => return whole(Refused("interpreters, which would be the host's"), 0),
        "bpfmap-file" | "bpfmap-data" => return whole(Refused("BPF maps"), 0),
        _ => {}
    }
    for (archive, content) in [("tmpfs-dev-", Data), ("tmpfs-", Data)] {
        let device = stem
            .strip_prefix(archive)
            .and_then(|s| s.strip_suffix(".tar.gz"));
        if device.is_some_and(is_decimal) {
            return whole(content, 0);
        }
    }
    let (prefix, number) = stem.rsplit_once('-')?;
    let hexadecimal = number
        .bytes()
        .all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    match prefix {
        "ghost-file" if hexadecimal => return whole(WithData("ghost_file_entry"), 0x5258_3605),
        "tcp-stream" if hexadecimal => return whole(WithData("tcp_stream_entry"), 0x5146_5506),
        _ => {}
    }
    if !is_decimal(number) {
        return None;
    }
    let (content, magic) = match prefix {
        "core" => (Messages("core_entry"), 0x5505_3847),
        "ids" => (Messages("task_kobj_ids_entry"), 0x5443_2030),
        "mm" => (Messages("mm_entry"), 0x5749_2820),
        "fs" => (Messages("fs_entry"), 0x5140_3912),
        "fdinfo" => (Messages("fdinfo_entry"), 0x5621_3732),
        "pagemap" | "pagemap-shmem" => (
            HeadAndMessages("pagemap_head", "pagemap_entry"),
            0x5608_4025,
        ),
        "utsns" => (Messages("utsns_entry"), 0x5447_3203),
        "timens" => (Messages("timens_entry"), 0x4311_4433),
        "pidns" => (Messages("pidns_entry"), 0x6115_7326),
        "userns" => (Messages("userns_entry"), 0x5547_4906),
        "netns" => (Messages("netns_entry"), 0x5593_3752),
        "netdev" => (Messages("net_device_entry"), 0x5737_3951),
        "mountpoints" => (Messages("mnt_entry"), 0x5556_3928),
        "ipcns-var" => (Messages("ipc_var_entry"), 0x5311_5007),
        "ipcns-shm" => (WithData("ipc_shm_entry"), 0x4628_3044),
        "ipcns-sem" => (WithData("ipc_sem_entry"), 0x5957_3019),
        "ipcns-msg" => (WithData("ipc_msg_entry"), 0x5545_3737),
        "pages" | "ifaddr" | "route" | "route6" | "rule" | "iptables" | "ip6tables"
        | "nftables" | "netns-ct" | "netns-exp" => (Data, 0),
        "autofs" => (Refused("automounts"), 0),
        "binfmt-misc" => (Refused("interpreters, which would be the host's"), 0),
        _ => return None,
    };
    Some((content, magic))
}

fn is_decimal(text: &str) -> bool {
    !text.is_empty() && text.len() <= 20 && text.bytes().all(|b| b.is_ascii_digit())
}

/// An image that is made of messages alone.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageFile {
    /// Its magic numbers, as they were.
    magic: Vec<u8>,
    pub messages: Vec<Message>,
}

impl ImageFile {
    /// Decodes the content of the file with this name, which holds [`ImageContent::Messages`] or
    /// [`ImageContent::HeadAndMessages`].
    pub fn decode(name: &str, content: &[u8]) -> Result<Self, ImageError> {
        let frames = Frames::open(name, content, Message::decode)?;
        Ok(Self {
            magic: frames.magic.to_owned(),
            messages: frames.collect::<Result<_, _>>()?,
        })
    }

    /// Returns the bytes of the file as CRIU writes them: the magic, then each message after its length.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = self.magic.clone();
        for message in &self.messages {
            let body = message.encode();
            out.extend(u32::try_from(body.len()).unwrap_or(0).to_le_bytes());
            out.extend(body);
        }
        out
    }
}

/// Returns the messages of an image for a report ([`Message::read`]). No restore needs this.
pub fn messages<'a>(
    name: &'a str,
    content: &'a [u8],
) -> Result<impl Iterator<Item = Result<Message, ImageError>> + 'a, ImageError> {
    Frames::open(name, content, Message::read)
}

/// Returns the first message of an image for a report.
pub fn first_message(name: &str, content: &[u8]) -> Result<Option<Message>, ImageError> {
    messages(name, content)?.next().transpose()
}

type Decode = fn(&'static MessageType, &[u8]) -> Result<Message, String>;

struct Frames<'a> {
    name: &'a str,
    magic: &'a [u8],
    rest: &'a [u8],
    at: usize,
    head: Option<&'static str>,
    of: &'static str,
    decode: Decode,
}

impl<'a> Frames<'a> {
    fn open(name: &'a str, content: &'a [u8], decode: Decode) -> Result<Self, ImageError> {
        let (head, of, expected) = match content_of(name) {
            Some((ImageContent::Messages(of), magic)) => (None, of, magic),
            Some((ImageContent::HeadAndMessages(head, of), magic)) => (Some(head), of, magic),
            None if matches!(name, "stats-dump" | "stats-restore") => {
                (None, "stats_entry", 0x5709_3306)
            }
            _ => return Err(wrong(name, 0, "is no image of messages".into())),
        };
        let (magic, rest) = split_magic(name, content, expected)?;
        Ok(Self {
            name,
            magic,
            rest,
            at: 0,
            head,
            of,
            decode,
        })
    }
}

impl Iterator for Frames<'_> {
    type Item = Result<Message, ImageError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let of = self.head.take().unwrap_or(self.of);
        let body = match self.at {
            MAX_MESSAGES => Err(ImageError::TooMuch {
                file: self.name.into(),
                what: format!("more than {MAX_MESSAGES} messages"),
            }),
            at => take_frame(self.name, at, &mut self.rest),
        };
        let message = body.and_then(|body| decode(self.name, self.at, of, body, self.decode));
        self.at += 1;
        if message.is_err() {
            self.rest = &[];
        }
        Some(message)
    }
}

/// Checks the messages of an image that has data between them ([`ImageContent::WithData`]), and returns them. Each must be
/// encoded as CRIU encodes it, since CRIU reads this file itself.
pub fn messages_with_data(name: &str, content: &[u8]) -> Result<Vec<Message>, ImageError> {
    let Some((ImageContent::WithData(of), expected)) = content_of(name) else {
        return Err(wrong(name, 0, "is no image of messages and data".into()));
    };
    if content.is_empty() {
        return Ok(Vec::new());
    }
    let (_, mut rest) = split_magic(name, content, expected)?;
    let mut messages = Vec::new();
    let next = |of: &'static str, rest: &mut &[u8], all: &mut Vec<Message>| {
        let body = take_frame(name, all.len(), rest)?;
        let message = decode(name, all.len(), of, body, Message::decode)?;
        if message.encode() != body {
            let reason = "is encoded in another way than CRIU's".to_owned();
            return Err(wrong(name, all.len(), reason));
        }
        all.push(message.clone());
        Ok(message)
    };
    while !rest.is_empty() {
        let message = next(of, &mut rest, &mut messages)?;
        let number = |field: &str| message.number(field).unwrap_or(0);
        let padded = |bytes: u64, to: u64| bytes.div_ceil(to).saturating_mul(to);
        let data = match of {
            "pipe_data_entry" => number("bytes"),
            "sk_packet_entry" => number("length"),
            "tcp_stream_entry" => number("inq_len").saturating_add(number("outq_len")),
            "ipc_shm_entry" if number("in_pagemaps") != 0 => 0,
            "ipc_shm_entry" => padded(number("size"), 4),
            "ipc_sem_entry" => padded(number("nsems").saturating_mul(2), 8),
            "ipc_msg_entry" => {
                for _ in 0..number("qnum") {
                    let part = next("ipc_msg", &mut rest, &mut messages)?;
                    let bytes = padded(part.number("msize").unwrap_or(0), 8);
                    skip(name, messages.len(), &mut rest, bytes)?;
                }
                0
            }
            "ghost_file_entry" if number("chunks") != 0 => {
                while !rest.is_empty() {
                    let part = next("ghost_chunk_entry", &mut rest, &mut messages)?;
                    let bytes = part.number("len").unwrap_or(0);
                    skip(name, messages.len(), &mut rest, bytes)?;
                }
                0
            }
            _ => rest.len() as u64, // a ghost file: its content
        };
        skip(name, messages.len(), &mut rest, data)?;
    }
    Ok(messages)
}

fn decode(
    name: &str,
    at: usize,
    of: &str,
    body: &[u8],
    decode: Decode,
) -> Result<Message, ImageError> {
    let of = MessageType::named(of).ok_or_else(|| wrong(name, at, format!("no type {of}")))?;
    decode(of, body).map_err(|reason| wrong(name, at, reason))
}

/// Splits an image into its magic numbers, one or two, and the rest.
fn split_magic<'a>(
    name: &str,
    content: &'a [u8],
    expected: u32,
) -> Result<(&'a [u8], &'a [u8]), ImageError> {
    let word = |at: usize| {
        let bytes = content.get(at..at + 4)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?))
    };
    let truncated = || ImageError::Truncated {
        file: name.into(),
        message: 0,
    };
    let first = word(0).ok_or_else(truncated)?;
    let len = match first {
        COMMON_MAGIC | SERVICE_MAGIC => 8,
        _ => 4,
    };
    let found = word(len - 4).ok_or_else(truncated)?;
    if found != expected {
        return Err(ImageError::Magic {
            file: name.into(),
            found,
            expected,
        });
    }
    Ok(content.split_at(len))
}

fn take_frame<'a>(name: &str, at: usize, rest: &mut &'a [u8]) -> Result<&'a [u8], ImageError> {
    let truncated = || ImageError::Truncated {
        file: name.into(),
        message: at,
    };
    let (len, after) = rest.split_first_chunk::<4>().ok_or_else(truncated)?;
    let len = u32::from_le_bytes(*len) as usize;
    if len > MAX_MESSAGE_BYTES {
        return Err(ImageError::TooMuch {
            file: name.into(),
            what: format!("a message of {len} bytes"),
        });
    }
    let (body, after) = after.split_at_checked(len).ok_or_else(truncated)?;
    *rest = after;
    Ok(body)
}

fn skip(name: &str, at: usize, rest: &mut &[u8], bytes: u64) -> Result<(), ImageError> {
    let after = usize::try_from(bytes).ok().and_then(|n| rest.get(n..));
    *rest = after.ok_or_else(|| ImageError::Truncated {
        file: name.into(),
        message: at,
    })?;
    Ok(())
}

fn wrong(file: &str, message: usize, reason: String) -> ImageError {
    ImageError::Message {
        file: file.into(),
        message,
        reason,
    }
}

/// Makes images for tests.
#[cfg(test)]
pub(crate) mod making {
    use super::*;

    /// Makes a message of these numbers, by field.
    pub(crate) fn message(of: &str, numbers: &[(&str, u64)]) -> Message {
        let mut message = Message::read(MessageType::named(of).unwrap(), b"").unwrap();
        for (field, number) in numbers {
            message.set_number(field, *number);
        }
        message
    }

    /// Makes the image with this name.
    pub(crate) fn image(name: &str, messages: &[Message]) -> Vec<u8> {
        let magic = content_of(name).map_or(0x5709_3306, |content| content.1);
        let mut magic = [COMMON_MAGIC, magic].map(u32::to_le_bytes).concat();
        if name == "inventory.img" {
            magic.drain(..4);
        }
        let messages = messages.to_vec();
        ImageFile { magic, messages }.encode()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(magic: u32, messages: &[&[u8]]) -> Vec<u8> {
        let mut all: Vec<u8> = [COMMON_MAGIC, magic]
            .iter()
            .flat_map(|m| m.to_le_bytes())
            .collect();
        for message in messages {
            all.extend(u32::try_from(message.len()).unwrap().to_le_bytes());
            all.extend(*message);
        }
        all
    }

    #[test]
    fn names() {
        let names = "inventory.img core-1.img pagemap-shmem-123.img tmpfs-dev-60.tar.gz.img ghost-file-1f.img \
            ipcns-shm-11.img netns-ct-10.img";
        for name in names.split(' ') {
            assert!(content_of(name).is_some(), "{name}");
        }
        let names = "reg-files.img core-.img core-x.img creds-1.img stats-dump core-1 tmpfs-dev-.tar.gz.img ../core-1.img \
            core-1.img.img tmpfs-1f.tar.gz.img";
        for name in names.split(' ') {
            assert_eq!(content_of(name), None, "{name}");
        }
        assert!(matches!(
            content_of("apparmor.img"),
            Some((ImageContent::Refused(_), _))
        ));
    }

    #[test]
    fn every_type_is_in_the_schema() {
        let names = "inventory pstree files seccomp cgroup tty-info tty-data filelocks remap-fpath memfd cpuinfo \
            pipes-data fifo-data sk-queues ghost-file-1 tcp-stream-1 core-1 ids-1 mm-1 fs-1 fdinfo-1 pagemap-1 \
            utsns-1 timens-1 pidns-1 userns-1 netns-1 netdev-1 mountpoints-1 ipcns-var-1 ipcns-shm-1 ipcns-sem-1 \
            ipcns-msg-1";
        for name in names.split(' ') {
            let types = match content_of(&format!("{name}.img")).unwrap().0 {
                ImageContent::Messages(a) | ImageContent::WithData(a) => vec![a],
                ImageContent::HeadAndMessages(a, b) => vec![a, b],
                other => panic!("{name}: {other:?}"),
            };
            assert!(
                types.iter().all(|t| MessageType::named(t).is_some()),
                "{name}"
            );
        }
    }

    #[test]
    fn an_image_is_encoded_as_it_was() {
        let content = image(0x5447_3203, &[b"\x0a\x01a\x12\x01b"]);
        let decoded = ImageFile::decode("utsns-1.img", &content).unwrap();
        assert_eq!(decoded.encode(), content);
        let other = ImageFile::decode("utsns-1.img", &image(0x5447_3203, &[b"\x12\x01b\x0a\x01a"]));
        assert_eq!(other.unwrap().encode(), content);
        for (cut, want) in [
            (4, "ends in the middle"),
            (10, "ends in the middle"),
            (content.len() - 1, "ends in the middle"),
        ] {
            let e = ImageFile::decode("utsns-1.img", &content[..cut]).unwrap_err();
            assert!(e.to_string().contains(want), "{cut}: {e}");
        }
        assert!(ImageFile::decode("ids-1.img", &content).is_err());
    }

    #[test]
    fn data_between_messages() {
        let mut content = image(0x5645_3709, &[b"\x08\x01\x10\x03"]);
        content.extend(b"abc");
        content.extend(&image(0, &[b"\x08\x02\x10\x00"])[8..]);
        let found = messages_with_data("pipes-data.img", &content).unwrap();
        assert_eq!(found.len(), 2);
        let not_as_criu = [&image(0x5645_3709, &[b"\x10\x03\x08\x01"])[..], b"abc"].concat();
        assert!(messages_with_data("pipes-data.img", &not_as_criu).is_err());
        assert!(messages_with_data("pipes-data.img", &content[..content.len() - 1]).is_err());
        let more = image(0x5645_3709, &[b"\x08\x01\x10\x7f"]);
        assert!(messages_with_data("pipes-data.img", &more).is_err());
        assert_eq!(messages_with_data("pipes-data.img", b"").unwrap().len(), 0);
    }
}
