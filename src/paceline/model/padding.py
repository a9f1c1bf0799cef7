"""Groups sequences of similar length, each group for one padded call."""


def similar_lengths(lengths: list[int], waste: float = 0.3) -> list[list[int]]:
    """Indices in groups whose shortest is at least (1 - waste) of their longest, each group in its original order.

    Fewer, larger calls pay for some padding: a gap of sixteen tokens never splits a group.
    """
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not groups or lengths[index] < min((1 - waste) * longest, longest - 16):
            groups.append([])
            longest = lengths[index]
        groups[-1].append(index)
    return [sorted(group) for group in groups]
