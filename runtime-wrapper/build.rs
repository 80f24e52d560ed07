//! The statically linked build starts in `cryopod-fastpath`.

fn main() {
    let cfg = |name: &str| std::env::var(format!("CARGO_CFG_{name}")).unwrap_or_default();
    let is_static = cfg("TARGET_FEATURE").split(',').any(|f| f == "crt-static");
    if is_static && cfg("TARGET_ARCH") == "x86_64" && cfg("TARGET_OS") == "linux" {
        println!("cargo:rustc-link-arg-bin=cryopod-runtime=-Wl,-e,cryopod_start");
        println!("cargo:rustc-link-arg-bin=cryopod-runtime=-Wl,-u,cryopod_start");
    }
    println!("cargo:rerun-if-changed=build.rs");
}
