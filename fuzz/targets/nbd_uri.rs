//! NBD URIs from the command line and from other programs: what is understood is printed as a URI that
//! means the same.
#![no_main]
#![forbid(unsafe_code)]

use blockhouse_nbd::uri::NbdUri;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    match text.parse::<NbdUri>() {
        Ok(uri) => {
            let printed = uri.to_string();
            assert_eq!(printed.parse::<NbdUri>().as_ref(), Ok(&uri), "{printed}");
        }
        Err(error) => assert!(error.to_string().starts_with(text)),
    }
});
