//! The collectives, on anything that is a [`Payload`]: arguments are checked here, values move in the transport.

use burn::tensor::Device;

use crate::{Error, Result, phase};

use super::ProcessGroup;
use super::call::{Argument, Call, Operation, ReduceOp};
use super::parcel::Parcel;
use super::payload::Payload;
use super::reduce;
use super::transport::exchange_counted;

/// Legend: P the group's size, n the bytes of one value.
///
/// Every member must make the same calls in the same order. `# Errors` of all of them: [`Error::Group`] when a member
/// failed, left, did not come in time, or made another call; then every rank of the world gets that error, here or at its next
/// collective. [`Error::Invalid`] when the arguments do not fit on this rank alone: nothing was sent, and others wait until this
/// rank returns that error from [`launch`](super::launch).
///
/// A received Flex tensor shares the sender's memory: a view of a larger tensor keeps the larger one alive.
impl ProcessGroup {
    /// Sends part `i` to rank `i`; returns the parts that came, by sender. All shapes are equal.
    ///
    /// # Errors
    ///
    /// As above; [`Error::Invalid`] if there are not P parts, or their shapes differ.
    ///
    /// # Communication
    ///
    /// Sends and receives `(P - 1) n` bytes.
    ///
    /// ```
    /// use burn::tensor::TensorData;
    /// use burn_context_parallel::group::launch;
    ///
    /// let received = launch(2, |world| {
    ///     let me = world.rank() as i32;
    ///     world.all_to_all(vec![TensorData::from([me, 0]), TensorData::from([me, 1])])
    /// })?;
    /// assert_eq!(received[1], [TensorData::from([0, 1]), TensorData::from([1, 1])]);
    ///
    /// // One part too few.
    /// assert!(launch(2, |world| world.all_to_all(vec![TensorData::from([0])])).is_err());
    /// # Ok::<(), burn_context_parallel::group::LaunchError>(())
    /// ```
    pub fn all_to_all<T: Payload>(&self, parts: Vec<T>) -> Result<Vec<T>> {
        let operation = Operation::AllToAll;
        self.count_parts(operation, parts.len())?;
        let (parts, home) = pack_all(parts)?;
        let (first, shape) = (&parts[0], parts[0].shape().to_vec());
        for (index, part) in parts.iter().enumerate() {
            if part.shape() != first.shape() {
                return Err(Error::invalid(
                    operation.name(),
                    format!("part {index} is {:?}, part 0 is {shape:?}", part.shape()),
                    "use all_to_all_uneven for parts of different shapes",
                ));
            }
        }
        let dtype = one_dtype(operation, parts.iter())?;
        if self.size() == 1 {
            return unpack_all(parts, home.as_ref());
        }
        let _phase = phase::enter(operation.name(), None);
        let parts = self.prepare_all(parts.into_iter().map(Some).collect())?;
        let call = Call { dtype, shapes: Some(vec![shape]), ..self.begin::<T>(operation) };
        let parts = exchange_counted(&*self.transport, &call, parts)?;
        unpack_all(parts.into_iter().flatten(), home.as_ref())
    }

    /// Sends part `i` to rank `i`, or nothing; `expected[i]` is the shape of what rank `i` sends here. Returns the parts
    /// that came, by sender.
    ///
    /// Shapes may all differ. That every rank knows what it will get is what makes a wrong split an error on every rank,
    /// and what a transport without handshakes needs.
    ///
    /// # Errors
    ///
    /// As above; [`Error::Group`] as well if a rank sends what another does not expect. [`Error::Invalid`] if there are not P
    /// parts and P expectations, or element types differ.
    ///
    /// # Communication
    ///
    /// Sends and receives the parts that are not this rank's own.
    pub fn all_to_all_uneven<T: Payload>(
        &self,
        parts: Vec<Option<T>>,
        expected: &[Option<Vec<usize>>],
    ) -> Result<Vec<Option<T>>> {
        let operation = Operation::AllToAllUneven;
        self.count_parts(operation, parts.len())?;
        self.count_parts(operation, expected.len())?;
        let home = parts.iter().flatten().find_map(T::home).or_else(|| self.home.clone());
        let parts = parts.into_iter().map(|part| part.map(T::pack).transpose());
        let parts = parts.collect::<Result<Vec<_>>>()?;
        let me = self.rank();
        if parts[me].as_ref().map(Parcel::shape) != expected[me].as_deref() {
            return Err(Error::invalid(
                operation.name(),
                format!(
                    "rank {me} keeps {:?} for itself, but expects {:?}",
                    parts[me].as_ref().map(Parcel::shape),
                    expected[me]
                ),
                "derive both from one description of who holds what",
            ));
        }
        let dtype = one_dtype(operation, parts.iter().flatten())?;
        let unpack = |part: Option<Parcel>| part.map(|p| T::unpack(p, home.as_ref())).transpose();
        if self.size() == 1 {
            return parts.into_iter().map(unpack).collect();
        }
        let _phase = phase::enter(operation.name(), None);
        let parts = self.prepare_all(parts)?;
        let argument = self.about.map(Argument::About);
        let call = Call { dtype, argument, expects: Some(expected.to_vec()), ..self.begin::<T>(operation) };
        let parts = exchange_counted(&*self.transport, &call, parts)?;
        parts.into_iter().map(unpack).collect()
    }

    /// Every rank's part, by rank. All shapes are equal.
    ///
    /// # Errors
    ///
    /// As above.
    ///
    /// # Communication
    ///
    /// Sends and receives `(P - 1) n` bytes.
    pub fn all_gather<T: Payload>(&self, part: T) -> Result<Vec<T>> {
        self.gather(Operation::AllGather, part)
    }

    /// Every rank's part, by rank. Shapes may differ; element type and number of dimensions may not.
    ///
    /// # Errors
    ///
    /// As above.
    ///
    /// # Communication
    ///
    /// Sends its part `P - 1` times, receives the others.
    pub fn all_gather_uneven<T: Payload>(&self, part: T) -> Result<Vec<T>> {
        self.gather(Operation::AllGatherUneven, part)
    }

    fn gather<T: Payload>(&self, operation: Operation, part: T) -> Result<Vec<T>> {
        let (part, home) = pack(part)?;
        if self.size() == 1 {
            return Ok(vec![T::unpack(part, home.as_ref())?]);
        }
        let _phase = phase::enter(operation.name(), None);
        let own = part.clone();
        let part = self.transport.prepare(part)?;
        let mut call = Call {
            dtype: Some(part.dtype()),
            dims: Some(part.shape().len()),
            argument: self.about.map(Argument::About),
            ..self.begin::<T>(operation)
        };
        if operation == Operation::AllGather {
            call.shapes = Some(vec![part.shape().to_vec()]);
        }
        let mut parts = self.transport.all_gather(&call, part)?;
        parts[self.rank()] = own;
        unpack_all(parts, home.as_ref())
    }

    /// The reduction of every rank's part for this rank: part `i` goes to rank `i`.
    ///
    /// Parts for different ranks may have different shapes; the parts for one rank may not. Summed in rank order, half
    /// precision in `f32`.
    ///
    /// # Errors
    ///
    /// As above; [`Error::Invalid`] if there are not P parts, or for booleans.
    ///
    /// # Communication
    ///
    /// Sends the parts that are not this rank's own, receives `P - 1` times its own part.
    pub fn reduce_scatter<T: Payload>(&self, parts: Vec<T>, op: ReduceOp) -> Result<T> {
        let operation = Operation::ReduceScatter;
        self.count_parts(operation, parts.len())?;
        let (mut parts, home) = pack_all(parts)?;
        let dtype = one_dtype(operation, parts.iter())?;
        reduce::check(operation.name(), parts[0].dtype())?;
        if self.size() == 1 {
            return T::unpack(parts.remove(0), home.as_ref());
        }
        let _phase = phase::enter(operation.name(), None);
        let parts = parts.into_iter().map(|part| self.transport.prepare(part));
        let parts = parts.collect::<Result<Vec<_>>>()?;
        let call = Call {
            dtype,
            argument: Some(Argument::Reduce(op)),
            shapes: Some(parts.iter().map(|part| part.shape().to_vec()).collect()),
            ..self.begin::<T>(operation)
        };
        T::unpack(self.transport.reduce_scatter(&call, parts, op)?, home.as_ref())
    }

    /// The reduction of every rank's value; the same bits on every rank.
    ///
    /// Summed in rank order, half precision in `f32`.
    ///
    /// # Errors
    ///
    /// As above; [`Error::Invalid`] for booleans.
    ///
    /// # Communication
    ///
    /// Sends and receives `(P - 1) n` bytes up to [`DIRECT_BYTES`](super::DIRECT_BYTES), `2 (P - 1) n / P` above, where P
    /// divides the number of elements.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_context_parallel::group::{ReduceOp, launch};
    ///
    /// let sums = launch(4, |world| {
    ///     let x = Tensor::<1>::from_floats([1.0, world.rank() as f32], &Device::flex());
    ///     world.all_reduce(x, ReduceOp::Sum).map(|sum| sum.into_data())
    /// })?;
    /// assert_eq!(sums[3].try_to_vec::<f32>().unwrap(), [4.0, 6.0]);
    ///
    /// // A value with autodiff would lose its gradient without a word.
    /// let lost = launch(4, |world| {
    ///     world.all_reduce(Tensor::<1>::zeros([1], &Device::flex().autodiff()), ReduceOp::Sum)
    /// });
    /// assert!(lost.unwrap_err().to_string().contains("autodiff"));
    /// # Ok::<(), burn_context_parallel::group::LaunchError>(())
    /// ```
    pub fn all_reduce<T: Payload>(&self, value: T, op: ReduceOp) -> Result<T> {
        let operation = Operation::AllReduce;
        let (value, home) = pack(value)?;
        reduce::check(operation.name(), value.dtype())?;
        if self.size() == 1 {
            return T::unpack(value, home.as_ref());
        }
        let _phase = phase::enter(operation.name(), None);
        let value = self.transport.prepare(value)?;
        let call = Call {
            dtype: Some(value.dtype()),
            argument: Some(Argument::Reduce(op)),
            shapes: Some(vec![value.shape().to_vec()]),
            ..self.begin::<T>(operation)
        };
        T::unpack(self.transport.all_reduce(&call, value, op)?, home.as_ref())
    }

    /// The root's value, on every rank.
    ///
    /// Elsewhere `value` may be `None`, and the result lives where [`at`](Self::at) says, or on the root's device; or a value of the same
    /// shape and type, which is replaced and says on which device the result shall live.
    ///
    /// # Errors
    ///
    /// As above; [`Error::Invalid`] if the root is not in the group or brings nothing.
    ///
    /// # Communication
    ///
    /// The root sends `(P - 1) n` bytes, everyone else receives n.
    pub fn broadcast<T: Payload>(&self, value: Option<T>, root: usize) -> Result<T> {
        let operation = Operation::Broadcast;
        if root >= self.size() {
            return Err(Error::invalid(
                operation.name(),
                format!("root {root} is not in a group of {}", self.size()),
                "the root is a rank of this group, counted from 0",
            ));
        }
        let home = value.as_ref().and_then(T::home).or_else(|| self.home.clone());
        let value = value.map(T::pack).transpose()?;
        let is_root = root == self.rank();
        if is_root && value.is_none() {
            return Err(Error::invalid(
                operation.name(),
                format!("rank {root} is the root and brings nothing"),
                "give the value there",
            ));
        }
        if self.size() == 1 {
            return value.map_or_else(|| unreachable!("just checked"), |v| T::unpack(v, home.as_ref()));
        }
        let _phase = phase::enter(operation.name(), None);
        let call = Call {
            dtype: value.as_ref().map(Parcel::dtype),
            dims: value.as_ref().map(|value| value.shape().len()).or(T::DIMS),
            shapes: value.as_ref().map(|value| vec![value.shape().to_vec()]),
            argument: Some(Argument::Root(root)),
            ..self.begin::<T>(operation)
        };
        let own = value.filter(|_| is_root);
        let sent = own.clone().map(|value| self.transport.prepare(value)).transpose()?;
        let arrived = self.transport.broadcast(&call, sent, root)?;
        T::unpack(own.unwrap_or(arrived), home.as_ref())
    }

    /// Passes `value` around the ring: to the rank `by` further on, from the rank `by` before. `by` may be negative.
    ///
    /// # Errors
    ///
    /// As above.
    ///
    /// # Communication
    ///
    /// Sends and receives n bytes; none if P divides `by`.
    pub fn shift<T: Payload>(&self, value: T, by: isize) -> Result<T> {
        let (value, home) = pack(value)?;
        if self.size() == 1 {
            return T::unpack(value, home.as_ref());
        }
        let _phase = phase::enter(Operation::Shift.name(), None);
        let value = self.transport.prepare(value)?;
        let steps = by.rem_euclid(self.size() as isize);
        let call = Call {
            dtype: Some(value.dtype()),
            argument: Some(Argument::By(steps)),
            shapes: Some(vec![value.shape().to_vec()]),
            ..self.begin::<T>(Operation::Shift)
        };
        let value = self.transport.shift(&call, value, steps as usize)?;
        T::unpack(value, home.as_ref())
    }

    /// Waits until every member is here.
    ///
    /// # Errors
    ///
    /// As above.
    ///
    /// # Communication
    ///
    /// No bytes.
    pub fn barrier(&self) -> Result<()> {
        if self.size() == 1 {
            return Ok(());
        }
        let _phase = phase::enter(Operation::Barrier.name(), None);
        self.transport.counters().called(Operation::Barrier);
        let call = Call { sequence: self.transport.begin(), ..Call::new(Operation::Barrier) };
        self.transport.barrier(&call)
    }

    fn begin<T: Payload>(&self, operation: Operation) -> Call {
        self.transport.counters().called(operation);
        Call { sequence: self.transport.begin(), kind: Some(T::KIND), ..Call::new(operation) }
    }

    /// Parts for every rank, ready to go; this rank's own stays where it is.
    fn prepare_all(&self, parts: Vec<Option<Parcel>>) -> Result<Vec<Option<Parcel>>> {
        let parts = parts.into_iter().enumerate().map(|(to, part)| match part {
            Some(part) if to != self.rank() => self.transport.prepare(part).map(Some),
            own => Ok(own),
        });
        parts.collect()
    }

    fn count_parts(&self, operation: Operation, parts: usize) -> Result<()> {
        if parts == self.size() {
            return Ok(());
        }
        Err(Error::invalid(
            operation.name(),
            format!("{parts} parts for {} ranks", self.size()),
            "give one part for every rank of the group, this one included",
        ))
    }
}

fn pack<T: Payload>(value: T) -> Result<(Parcel, Option<Device>)> {
    let home = value.home();
    Ok((value.pack()?, home))
}

fn pack_all<T: Payload>(parts: Vec<T>) -> Result<(Vec<Parcel>, Option<Device>)> {
    let home = parts.first().and_then(T::home);
    let parts = parts.into_iter().map(T::pack).collect::<Result<_>>()?;
    Ok((parts, home))
}

fn unpack_all<T: Payload>(parts: impl IntoIterator<Item = Parcel>, home: Option<&Device>) -> Result<Vec<T>> {
    parts.into_iter().map(|part| T::unpack(part, home)).collect()
}

/// The element type of all parts.
fn one_dtype<'a>(operation: Operation, parts: impl Iterator<Item = &'a Parcel>) -> Result<Option<burn::tensor::DType>> {
    let mut dtype = None;
    for part in parts {
        let first = *dtype.get_or_insert(part.dtype());
        if first != part.dtype() {
            return Err(Error::invalid(
                operation.name(),
                format!("parts of {} and of {}", first.name(), part.dtype().name()),
                "all parts of one collective have one element type",
            ));
        }
    }
    Ok(dtype)
}
