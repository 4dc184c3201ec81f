-- What was rejected or dropped does not exceed the limit: a number, or a share of it and the rows that were kept.
select
    format('{} of {} lost ({:.4g} %), allowed by {}: {}', lost, kept + lost, 100.0 * lost / (kept + lost), setting, allowed)
        as problem,
    '`' || command || '`' as listed_by
from (select count(*) as lost from own_losses)
cross join (select count(*) as kept from own_rows)
cross join loss_limit
where
    lost > most
    or lost::hugeint * 100_000_000 > (kept + lost)::hugeint * share  -- exact, as 29 % of 100 is 29
order by problem
