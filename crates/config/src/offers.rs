//! Which images `serve` offers at which NBD sockets, and under which names.
//!
//! Guarantees: a socket offers only what its URIs name, and the command line alone decides what
//! each socket offers. An ambiguous command line is wrong usage, with a line that says what to
//! type.

use std::path::{Path, PathBuf};

use blockhouse_disk::Access;
use blockhouse_nbd::uri::{Address, NbdUri};
use blockhouse_storage::Location;

use crate::text_fields::repeated;

/// The options of an export: the rights of its clients, and its description.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportOptions {
    /// Whether clients may change the disk. A read-only disk is not writable in any case.
    pub access: Access,
    /// Whether NBD clients may query which image of the chain has the data (qemu:allocation-depth).
    pub has_depth: bool,
    /// A text for the users of NBD clients: at most 4096 bytes without NUL. May be empty.
    pub description: String,
}

impl Default for ExportOptions {
    /// All rights that the disk allows, without a description.
    fn default() -> Self {
        Self { access: Access::ReadWrite, has_depth: true, description: String::new() }
    }
}

/// An image, with its export name at a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The name of the export.
    pub name: String,
    /// The index of the image on the command line, from 0.
    pub image: usize,
    /// The options of the export.
    pub options: ExportOptions,
}

impl Offer {
    /// An image, with the default options.
    pub fn new(name: String, image: usize) -> Self {
        Self { name, image, options: ExportOptions::default() }
    }
}

/// The images and their names.
#[derive(Debug)]
pub struct Offers {
    images: Vec<PathBuf>,
    /// The values of `--name`: one for each image, or none.
    names: Vec<String>,
    options: ExportOptions,
}

impl Offers {
    /// The offers of these images (at least one), with the names of `--name` in the order of the
    /// images.
    ///
    /// # Errors
    /// There are too few or too many names, or names that could be confused.
    pub fn new(images: &[PathBuf], names: &[String]) -> Result<Self, String> {
        if !names.is_empty() && names.len() != images.len() {
            return Err(match images {
                [_] => "one image has one name; leave the other --name out".into(),
                _ => format!(
                    "{} images need one --name each, in their order, or none at all",
                    images.len()
                ),
            });
        }
        if images.len() > 1 && names.iter().any(String::is_empty) {
            return Err("several images need names that are not empty".into());
        }
        if let Some(name) = repeated(names) {
            return Err(format!("two images have --name '{name}'; give each its own name"));
        }
        let (images, names) = (images.to_vec(), names.to_vec());
        Ok(Self { images, names, options: ExportOptions::default() })
    }

    /// The same images, with these options of all exports.
    #[must_use]
    pub fn with_options(self, options: ExportOptions) -> Self {
        Self { options, ..self }
    }

    fn offer(&self, name: String, image: usize) -> Offer {
        Offer { options: self.options.clone(), ..Offer::new(name, image) }
    }

    /// All images under their own names: the exports of a socket that no URI with a name describes.
    /// A single image has the empty name unless `--name` gives one, so that its clients need no
    /// name. Several images without `--name` have the names of their files.
    ///
    /// # Errors
    /// Two images would have the same name, or a file's name cannot be an export's name.
    pub fn all(&self) -> Result<Vec<Offer>, String> {
        let names = match &self.images[..] {
            [_] if self.names.is_empty() => vec![String::new()],
            _ if !self.names.is_empty() => self.names.clone(),
            images => images.iter().map(|image| file_name(image)).collect::<Result<_, _>>()?,
        };
        if let Some(name) = repeated(&names) {
            return Err(format!(
                "two images are called '{name}'; give each image its own name: one --name NAME per \
                 image, in their order"
            ));
        }
        Ok(names.into_iter().enumerate().map(|(image, name)| self.offer(name, image)).collect())
    }

    /// The image that the name in a URI means. A single image matches any name. Of several images,
    /// the one with this name matches, or else the one whose file has this name without its
    /// extension.
    fn named(&self, name: &str) -> Result<Offer, String> {
        if self.images.len() == 1 {
            return Ok(self.offer(name.into(), 0));
        }
        let all = self.all()?;
        let is_stem = |offer: &&Offer| {
            let file = Path::new(&offer.name);
            self.names.is_empty() && file.file_stem().is_some_and(|stem| stem == name)
        };
        let exact = all.iter().find(|offer| offer.name == name);
        let stems: Vec<_> = all.iter().filter(is_stem).collect();
        let only_stem = match stems[..] {
            [only] => Some(only),
            _ => None,
        };
        match (exact.or(only_stem), &stems[..]) {
            (Some(offer), _) => Ok(self.offer(name.into(), offer.image)),
            (None, []) => Err(format!(
                "no image is called '{name}'; a URI's name says which image it serves: {}",
                list(all.iter())
            )),
            (None, several) => Err(format!(
                "'{name}' may be {}; write the whole name into the URI",
                list(several.iter().copied())
            )),
        }
    }

    /// The exports at each address. A URI with a name offers the image that the name means, under
    /// this name; a URI without a name offers all images under their own names. URIs with the same
    /// address share a socket.
    ///
    /// # Errors
    /// A name means no image or more than one, or a socket has two exports of one name.
    pub fn plan(&self, uris: &[NbdUri]) -> Result<Vec<(Address, Vec<Offer>)>, String> {
        let mut plan: Vec<(Address, Vec<Offer>)> = Vec::new();
        for uri in uris {
            let offers = match &uri.export[..] {
                "" => self.all(),
                name => self.named(name).map(|offer| vec![offer]),
            };
            let offers = offers.map_err(|why| format!("--nbd {uri}: {why}"))?;
            let index = plan.iter().position(|(address, _)| *address == uri.address);
            let index = index.unwrap_or_else(|| {
                plan.push((uri.address.clone(), Vec::new()));
                plan.len() - 1
            });
            for offer in offers {
                if plan[index].1.iter().any(|other| other.name == offer.name) {
                    return Err(format!(
                        "--nbd {uri}: another URI means the export '{}' of this socket already; leave \
                         one out",
                        offer.name
                    ));
                }
                plan[index].1.push(offer);
            }
        }
        Ok(plan)
    }

    /// Refuses images that no socket offers.
    ///
    /// # Errors
    /// There is such an image.
    pub fn check_all_offered<'a>(
        &self,
        offers: impl Iterator<Item = &'a Offer> + Clone,
    ) -> Result<(), String> {
        let missing =
            (0..self.images.len()).find(|&image| !offers.clone().any(|offer| offer.image == image));
        let Some(missing) = missing else { return Ok(()) };
        let name = match self.names.get(missing) {
            Some(name) => name.clone(),
            None => file_name(&self.images[missing])?,
        };
        let image = self.images[missing].display();
        Err(format!(
            "{image}: no --nbd URI serves it; leave the image out, or name it in a URI: \
             nbd+unix:///{name}?socket=PATH"
        ))
    }

    /// The image's name for a guest: that of `--name`, or the file's.
    pub fn label(&self, image: usize) -> String {
        match self.names.get(image) {
            Some(name) if !name.is_empty() => name.clone(),
            _ => Location::label(&self.images[image]).unwrap_or_default(),
        }
    }
}

fn file_name(image: &Path) -> Result<String, String> {
    let name = Location::base_name(image).and_then(|name| name.into_string().ok());
    name.ok_or_else(|| {
        format!(
            "{}: the file's name cannot name an export; give each image a name: one --name NAME per \
             image, in their order",
            image.display()
        )
    })
}

fn list<'a>(offers: impl Iterator<Item = &'a Offer>) -> String {
    offers.map(|offer| format!("'{}'", offer.name)).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offers(images: &[&str], names: &[&str]) -> Result<Offers, String> {
        let images: Vec<_> = images.iter().map(PathBuf::from).collect();
        let names: Vec<_> = names.iter().map(|name| name.to_string()).collect();
        Offers::new(&images, &names)
    }

    fn plan(
        images: &[&str],
        names: &[&str],
        uris: &[&str],
    ) -> Result<Vec<(Address, Vec<Offer>)>, String> {
        let uris: Vec<NbdUri> = uris.iter().map(|uri| uri.parse().expect("a URI")).collect();
        offers(images, names)?.plan(&uris)
    }

    /// The exports at each socket, as `name=image`.
    fn shown(images: &[&str], names: &[&str], uris: &[&str]) -> Vec<String> {
        let show = |offer: &Offer| format!("{}={}", offer.name, offer.image);
        let places = plan(images, names, uris).expect("a plan").into_iter();
        places.map(|(_, offers)| offers.iter().map(show).collect::<Vec<_>>().join(" ")).collect()
    }

    #[test]
    fn an_only_image_is_served_under_any_name() {
        let one = ["nbd+unix:///a?socket=s", "nbd+unix:///b?socket=s", "nbd+unix:///?socket=t"];
        assert_eq!(shown(&["x.img"], &[], &one), ["a=0 b=0", "=0"]);
        assert_eq!(shown(&["x.img"], &["n"], &one), ["a=0 b=0", "n=0"]);
    }

    #[test]
    fn names_say_which_of_several_images_a_socket_serves() {
        let images = ["vm/a.qcow2", "vm/b.img"];
        let uris = ["nbd+unix:///a.qcow2?socket=s", "nbd+unix:///b?socket=t"];
        assert_eq!(shown(&images, &[], &uris), ["a.qcow2=0", "b=1"]);
        assert_eq!(shown(&images, &[], &["nbd+unix:///?socket=s"]), ["a.qcow2=0 b.img=1"]);
        let named = ["nbd+unix:///two?socket=s", "nbd+unix:///?socket=t"];
        assert_eq!(shown(&images, &["one", "two"], &named), ["two=1", "one=0 two=1"]);
        // A full name takes precedence over a name without its extension.
        assert_eq!(shown(&["a", "a.img"], &[], &["nbd+unix:///a?socket=s"]), ["a=0"]);
    }

    #[test]
    fn what_is_ambiguous_is_refused_with_what_to_type() {
        let a = "nbd+unix:///a?socket=s";
        for (images, names, uris, words) in [
            (&["a.img", "a.raw"][..], &[][..], &[a][..], "may be 'a.img', 'a.raw'"),
            (&["b.img", "c.img"], &[], &[a], "no image is called 'a'"),
            (&["b.img", "c.img"], &[], &[a], "'b.img', 'c.img'"),
            (&["x/d.img", "y/d.img"], &[], &["nbd+unix:///?socket=s"], "one --name NAME per image"),
            (&["x/d.img", "y/d.img"], &["p", "p"], &[a], "two images have --name 'p'"),
            (&["a.img", "b.img"], &["p", "q"], &[a], "'p', 'q'"),
            (&["a.img", "b.img"], &["p"], &[a], "one --name each"),
            (&["a.img", "b.img"], &["p", ""], &[a], "not empty"),
            (&["a.img"], &["p", "q"], &[a], "one image has one name"),
            (&["a.img"], &[], &[a, a], "leave one out"),
            (&["a.img", "b.img"], &[], &[a, "nbd+unix:///?socket=s", a], "leave one out"),
        ] {
            let error = plan(images, names, uris).expect_err(words);
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn an_image_that_no_socket_offers_is_refused() {
        let offers = offers(&["a.img", "b.img"], &[]).expect("two images");
        let offered = [Offer::new("a".into(), 0)];
        let error = offers.check_all_offered(offered.iter()).expect_err("one is missing");
        assert!(error.starts_with("b.img: ") && error.contains("nbd+unix:///b.img?"), "{error}");
        assert_eq!(offers.check_all_offered(offers.all().expect("names").iter()), Ok(()));
    }
}
