//! NBD URIs from the command line and from other programs: what is understood is printed as a URI
//! that means the same, for a server as for a client.
#![no_main]
#![forbid(unsafe_code)]

use blockhouse_nbd::uri::{ClientUri, NbdUri};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    match text.parse::<NbdUri>() {
        Ok(uri) => {
            let printed = uri.to_string();
            assert_eq!(printed.parse::<NbdUri>().as_ref(), Ok(&uri), "{printed}");
            assert_eq!(text.parse::<ClientUri>(), Ok(uri.into()), "{text}");
        }
        Err(error) => assert!(error.to_string().starts_with(text)),
    }
    if let Err(error) = text.parse::<ClientUri>() {
        assert!(error.to_string().starts_with(text));
    }
});
