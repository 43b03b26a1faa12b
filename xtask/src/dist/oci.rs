//! The file tree of an OCI image (image-spec 1.1, image layout): the static binary and nothing
//! else.
//!
//! Invariants: the image runs as a user without rights (65532), tools that copy images (skopeo,
//! podman load oci:FOLDER, crane) accept the tree, and it has one layer.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use lab_tools::process;

use super::archive::tar;
use super::files;
use super::parts::Parts;

/// The id of a user and group without rights, which no distribution gives to a service.
const USER: u32 = 65532;

/// Makes `blockhouse-oci` in the output folder.
pub(super) fn make(parts: &Parts<'_>, binary: &Path) -> Result<()> {
    let image = parts.output.join("blockhouse-oci");
    files::make_anew(&image)?;
    let (digest, size, content) = layer(parts, binary, &image)?;
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let config = json!({
        "architecture": architecture,
        "os": "linux",
        "config": {
            "User": format!("{USER}:{USER}"),
            "Env": ["PATH=/usr/bin"],
            "Entrypoint": ["/usr/bin/blockhouse"],
            "Cmd": ["--help"],
            "WorkingDir": "/images",
            "StopSignal": "SIGTERM",
            "Labels": {
                "org.opencontainers.image.title": "blockhouse",
                "org.opencontainers.image.version": parts.version()?,
                "org.opencontainers.image.licenses": "Apache-2.0 OR MIT",
            },
        },
        "rootfs": { "type": "layers", "diff_ids": [content] },
    });
    let config = blob(&image, "application/vnd.oci.image.config.v1+json", &config)?;
    let layer_type = "application/vnd.oci.image.layer.v1.tar+gzip";
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config,
        "layers": [{ "mediaType": layer_type, "digest": digest, "size": size }],
    });
    let mut manifest = blob(&image, "application/vnd.oci.image.manifest.v1+json", &manifest)?;
    manifest["annotations"] = json!({ "org.opencontainers.image.ref.name": parts.version()? });
    let index = json!({ "schemaVersion": 2, "manifests": [manifest] });
    files::write(&image.join("index.json"), index.to_string())?;
    files::write(&image.join("oci-layout"), json!({ "imageLayoutVersion": "1.0.0" }).to_string())?;
    println!("xtask: {}", image.display());
    Ok(())
}

/// Makes the layer; returns its digest, its size, and the digest of its uncompressed content.
fn layer(parts: &Parts<'_>, binary: &Path, image: &Path) -> Result<(String, u64, String)> {
    let root = parts.staging.join("oci");
    files::copy_stripped(binary, &root.join("usr/bin"))?;
    files::copy(&parts.staging.join("THIRD-PARTY.txt"), &root.join("usr/share/doc/blockhouse"))?;
    files::write(
        &root.join("etc/passwd"),
        format!("blockhouse:x:{USER}:{USER}::/images:/sbin/nologin\n"),
    )?;
    files::write(&root.join("etc/group"), format!("blockhouse:x:{USER}:\n"))?;
    files::make(&root.join("images"))?;
    let archive = parts.staging.join("layer.tar");
    let mut pack = tar(parts, &root);
    pack.arg("--file").arg(&archive).args(["etc", "images", "usr"]);
    process::run(pack)?;
    let content = digest(&archive)?;
    let mut gzip = Command::new("gzip");
    gzip.args(["--no-name", "--best", "--force"]).arg(&archive);
    process::run(gzip)?;
    let archive = archive.with_added_extension("gz");
    let packed = digest(&archive)?;
    let size = fs::metadata(&archive).context("the layer is missing")?.len();
    files::write(
        &image.join(path_of(&packed)),
        fs::read(&archive).context("cannot read the layer")?,
    )?;
    Ok((packed, size, content))
}

/// Stores a document; returns its descriptor.
fn blob(image: &Path, media_type: &str, document: &Value) -> Result<Value> {
    let text = document.to_string();
    let file = image.join("document");
    files::write(&file, &text)?;
    let digest = digest(&file)?;
    let path = image.join(path_of(&digest));
    path.parent().into_iter().try_for_each(files::make)?;
    fs::rename(&file, &path).with_context(|| format!("cannot make {}", path.display()))?;
    Ok(json!({ "mediaType": media_type, "digest": digest, "size": text.len() }))
}

/// The digest of a file: `sha256:` and the checksum.
fn digest(file: &Path) -> Result<String> {
    let mut sum = Command::new("sha256sum");
    sum.arg("--binary").arg(file);
    let line = process::stdout_of(sum)?;
    let sum = line.split(' ').next().unwrap_or_default();
    Ok(format!("sha256:{sum}"))
}

/// The path of the blob with this digest.
fn path_of(digest: &str) -> String {
    format!("blobs/{}", digest.replace(':', "/"))
}
