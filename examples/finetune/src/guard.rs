//! Other people's code on other people's files: a panic in it is an error, and says so once.

use std::any::Any;
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};

thread_local! {
    /// Whether this thread is inside [`guarded`].
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// What `work` gives, or the message of its panic.
///
/// `work` must own what it changes: after a panic nobody may look at it.
pub(crate) fn guarded<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    let outer = INSIDE.replace(true);
    let result = panic::catch_unwind(AssertUnwindSafe(work));
    INSIDE.set(outer);
    result.map_err(|panic| message(&*panic))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.map_or_else(|| "it panicked".to_owned(), |text| text.lines().collect::<Vec<_>>().join(" "))
}

/// Keeps panics quiet that become errors (a damaged tokenizer.json is one); others are reported as before.
///
/// For the beginning of a program, before it has threads: the hook is the process's, which is why no library function sets it.
pub fn quiet_guarded_panics() {
    let report = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if !INSIDE.get() {
            report(info);
        }
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_with_its_message_in_one_line() {
        assert_eq!(guarded(|| 3), Ok(3));
        assert_eq!(guarded(|| panic!("so\nit is {}", 4)), Err::<(), _>("so it is 4".to_owned()));
        assert_eq!(guarded(|| panic::panic_any(3)), Err::<(), _>("it panicked".to_owned()));
        let nested = guarded(|| (guarded(|| panic!("inner")), INSIDE.get()));
        assert_eq!(nested, Ok((Err::<(), _>("inner".to_owned()), true)));
        assert!(!INSIDE.get());
    }
}
