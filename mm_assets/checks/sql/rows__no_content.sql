-- The row table holds no media bytes.
select sample_id, position, modality, content_size
from rows_with_content
where content_size is not null
order by ordinal
