//! A copy that has begun: who began it waits, who does it settles it.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::OffloadError;

/// The end of a copy, to be waited for.
#[derive(Debug)]
pub struct Ticket<T>(Arc<Shared<T>>);

/// The other side: settled once, or dropped, which is a failure. So nobody waits for a copy that nobody makes.
#[derive(Debug)]
pub struct Promise<T>(Option<Arc<Shared<T>>>);

#[derive(Debug)]
struct Shared<T> {
    state: Mutex<State<T>>,
    settled: Condvar,
}

#[derive(Debug)]
enum State<T> {
    Open,
    Settled(Result<T, OffloadError>),
    Taken,
}

impl<T> Ticket<T> {
    /// Both sides.
    #[allow(clippy::new_ret_no_self)] // a pair
    pub fn new() -> (Self, Promise<T>) {
        let shared = Arc::new(Shared { state: Mutex::new(State::Open), settled: Condvar::new() });
        (Self(shared.clone()), Promise(Some(shared)))
    }

    /// Of what is over already.
    pub fn settled(result: Result<T, OffloadError>) -> Self {
        let (ticket, promise) = Self::new();
        promise.settle(result);
        ticket
    }

    /// Whether it is over.
    pub fn is_settled(&self) -> bool {
        !matches!(*self.lock(), State::Open)
    }

    /// Waits until it is over.
    pub fn wait(&self) {
        drop(self.settled_state());
    }

    /// Waits, and takes the result.
    ///
    /// # Errors
    ///
    /// The copy's, and [`OffloadError::Copy`] if the result was taken before.
    pub fn take(&self) -> Result<T, OffloadError> {
        match std::mem::replace(&mut *self.settled_state(), State::Taken) {
            State::Settled(result) => result,
            State::Open | State::Taken => Err(OffloadError::copy("copying", 0, "its result was taken twice")),
        }
    }

    fn settled_state(&self) -> MutexGuard<'_, State<T>> {
        let open = |state: &mut State<T>| matches!(state, State::Open);
        self.0.settled.wait_while(self.lock(), open).unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Clone for Ticket<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Promise<T> {
    /// Ends it.
    pub fn settle(mut self, result: Result<T, OffloadError>) {
        self.end(result);
    }

    fn end(&mut self, result: Result<T, OffloadError>) {
        let Some(shared) = self.0.take() else { return };
        *shared.state.lock().unwrap_or_else(PoisonError::into_inner) = State::Settled(result);
        shared.settled.notify_all();
    }
}

impl<T> Drop for Promise<T> {
    fn drop(&mut self) {
        self.end(Err(OffloadError::copy("copying", 0, "the copy queue gave it up")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_promise_that_is_dropped_fails_its_ticket() {
        let (ticket, promise) = Ticket::<u8>::new();
        assert!(!ticket.is_settled());
        let waiting = std::thread::spawn({
            let ticket = ticket.clone();
            move || ticket.take()
        });
        drop(promise);
        assert!(matches!(waiting.join().unwrap(), Err(OffloadError::Copy { .. })));
        assert!(ticket.is_settled() && ticket.take().is_err());
    }

    #[test]
    fn a_result_is_taken_once() {
        let ticket = Ticket::settled(Ok(7));
        assert!(ticket.is_settled());
        ticket.wait();
        assert_eq!(ticket.take(), Ok(7));
        assert!(ticket.take().is_err());
    }
}
