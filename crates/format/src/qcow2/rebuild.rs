//! Refcounts made anew from the tables that refer to clusters: what an image needs that was not
//! closed while its refcounts were written late.

use blockhouse_core::{Error, ErrorKind, Result, Storage};

use super::Qcow2;
use super::recorded::{Recorded, beside};
use super::references::References;

impl<S: Storage> Qcow2<S> {
    /// Sets every refcount to what the tables say, durably, and calls the image clean.
    ///
    /// # Errors
    /// `Corrupt` when the tables themselves are damaged: nothing is changed then.
    pub(super) async fn rebuild_refcounts(&self) -> Result<()> {
        let header = self.state.lock().disk_header.clone();
        let references = References::count(&self.storage, &header).await?;
        if let Some(problem) = references.problems.first() {
            let what = format!("refcounts cannot be rebuilt: {problem}");
            return Err(Error::new(ErrorKind::Corrupt, what)
                .on(self.storage.name())
                .hint("repair the image (check --repair all)"));
        }
        let recorded = Recorded::read(&self.storage, &header).await?;
        for (cluster, count, recorded) in beside(&references.counts, &recorded) {
            if count == recorded {
                continue;
            }
            let correct = |state: &mut super::State| {
                if state.cache.is_crowded() {
                    return Err(super::Blocked::Crowded);
                }
                state.correct_refcount(cluster, u64::from(count))
            };
            self.step(correct).await?;
        }
        self.write_everything().await?;
        self.finish().await
    }
}
