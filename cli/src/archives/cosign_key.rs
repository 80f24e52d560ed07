//! Decrypts private keys of cosign, which `cosign generate-key-pair` makes: NaCl's secretbox, by a key that scrypt makes of
//! the password.

use anyhow::{Context, anyhow, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use crypto_secretbox::aead::Aead;
use crypto_secretbox::{KeyInit, XSalsa20Poly1305};
use scrypt::Params;
use serde::Deserialize;

/// cosign's variable.
const PASSWORD: &str = "COSIGN_PASSWORD";
/// As much memory as the derivation may take: sixteen times that of cosign's keys.
const MAX_BYTES: u64 = 1 << 30;

#[derive(Deserialize)]
struct Sealed {
    kdf: Kdf,
    cipher: Cipher,
    ciphertext: String,
}

#[derive(Deserialize)]
struct Kdf {
    name: String,
    params: KdfParams,
    salt: String,
}

#[derive(Deserialize)]
struct KdfParams {
    #[serde(rename = "N")]
    n: u64,
    r: u32,
    p: u32,
}

#[derive(Deserialize)]
struct Cipher {
    name: String,
    nonce: String,
}

/// Returns the key in DER of PKCS #8; `None` if the text is no encrypted key of cosign.
pub fn decrypt(text: &str) -> anyhow::Result<Option<Vec<u8>>> {
    let kinds =
        ["SIGSTORE", "COSIGN"].map(|by| format!("-----BEGIN ENCRYPTED {by} PRIVATE KEY-----"));
    if !kinds.iter().any(|kind| text.trim_start().starts_with(kind)) {
        return Ok(None);
    }
    let password = std::env::var(PASSWORD)
        .with_context(|| format!("the key is encrypted: set {PASSWORD} to its password"))?;
    let lines = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.starts_with("-----"));
    let sealed: Sealed = serde_json::from_slice(&BASE64.decode(lines.collect::<String>())?)?;
    let Kdf { name, params, salt } = sealed.kdf;
    let KdfParams { n, r, p } = params;
    let bytes = n
        .checked_mul(u64::from(r))
        .and_then(|blocks| blocks.checked_mul(128));
    if name != "scrypt" || sealed.cipher.name != "nacl/secretbox" || !n.is_power_of_two() {
        bail!("the key is encrypted in an unknown way");
    }
    if bytes.is_none_or(|bytes| bytes > MAX_BYTES) || p > 16 {
        bail!("the key's password takes more than {MAX_BYTES} bytes of memory to check");
    }
    let mut key = [0; 32];
    let params = Params::new(n.ilog2() as u8, r, p, key.len())?;
    scrypt::scrypt(
        password.as_bytes(),
        &BASE64.decode(salt)?,
        &params,
        &mut key,
    )?;
    let nonce: [u8; 24] = BASE64
        .decode(sealed.cipher.nonce)?
        .try_into()
        .map_err(|_| anyhow!("its nonce has not 24 bytes"))?;
    let opened = XSalsa20Poly1305::new(&key.into())
        .decrypt(&nonce.into(), &BASE64.decode(sealed.ciphertext)?[..]);
    let wrong = |_| anyhow!("{PASSWORD} is not the key's password");
    Ok(Some(opened.map_err(wrong)?))
}
