//! The method `image.create`.

use blockhouse_config::text_fields::check_absolute;
use blockhouse_disk::{Backing, CreateOptions, DataFile, ImageFormat};

use super::image_methods::ImageCreateParams;
use super::methods::Done;
use super::outcome::{Outcome, invalid, result};
use super::rpc::Failure;
use crate::running::Running;
use crate::running::images::create_image;

/// Makes an image.
pub(super) async fn create(running: &Running, given: ImageCreateParams) -> Outcome {
    check_absolute(&given.path).map_err(invalid)?;
    let options = match given.format {
        ImageFormat::Raw => {
            check_plain(&given)?;
            None
        }
        ImageFormat::Qcow2 => Some(options(&given)?),
        _ => return Err(invalid("images of this format are not made; use raw or qcow2".into())),
    };
    let path = &given.path;
    create_image(running, path, given.size, options.as_ref(), given.overwrite).await?;
    result(Done {})
}

/// Refuses options that a raw image does not have.
fn check_plain(given: &ImageCreateParams) -> Result<(), Failure> {
    let has_options = given.backing.is_some()
        || given.backing_format.is_some()
        || given.cluster_size.is_some()
        || given.refcount_bits.is_some()
        || given.compression.is_some()
        || given.extended_l2
        || given.lazy_refcounts
        || given.data_file.is_some()
        || given.data_file_raw;
    if has_options {
        Err(invalid("a raw image has only a size: leave the options of qcow2 out".into()))
    } else {
        Ok(())
    }
}

fn options(given: &ImageCreateParams) -> Result<CreateOptions, Failure> {
    let usual = CreateOptions::new(given.size);
    let backing = match (&given.backing, &given.backing_format) {
        (Some(name), Some(format)) => {
            Some(Backing { name: name.clone().into_bytes(), format: Some(format.clone()) })
        }
        (None, None) => None,
        _ => return Err(invalid("backing and backing-format need each other".into())),
    };
    given.data_file.iter().try_for_each(|path| check_absolute(path)).map_err(invalid)?;
    if given.data_file_raw && given.data_file.is_none() {
        return Err(invalid("data-file-raw needs data-file".into()));
    }
    let raw = given.data_file_raw.into();
    let data_file = given
        .data_file
        .as_ref()
        .map(|path| DataFile { name: path.as_os_str().as_encoded_bytes().to_vec(), raw });
    Ok(CreateOptions {
        cluster_size: given.cluster_size.unwrap_or(usual.cluster_size),
        refcount_bits: given.refcount_bits.unwrap_or(usual.refcount_bits),
        lazy_refcounts: given.lazy_refcounts.into(),
        extended_l2: given.extended_l2.into(),
        compression: given.compression.unwrap_or_default(),
        backing,
        data_file,
        ..usual
    })
}
